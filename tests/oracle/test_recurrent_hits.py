"""State beside keys and values, in an engine: whose is taken up, when it is gone, and after a preemption."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from shoal.actors.engine.step import SequenceId
from shoal.actors.messages import EngineRequest, PrefixSource, RequestId, SamplingParams
from shoal.kvstore.block_hash import extend_keys, root_key, segment_key
from tests.fake_store import OTHER, OWN, Stores
from tests.oracle.cuts import RECURRENT, Logits, Subject
from tests.oracle.recording import Served, greedy

NUM_OUTPUT = 40


@pytest.fixture(scope="module", params=[*RECURRENT, "deepseek-v4-16"])
def subject(request: pytest.FixtureRequest, subject_named: Callable[[str], Subject]) -> Subject:
    return subject_named(request.param)


class Asked:
    """One engine; what it said, with the logits of all that it computed."""

    def __init__(self, subject: Subject, stores: Stores | None = None) -> None:
        self.logits, self.stores = Logits(subject.tolerance), stores or Stores()
        self.served = Served(subject.loaded, subject.setup, watch=(), look=self.logits.look, stores=stores)
        self._others = subject.others

    def submit(self, request: EngineRequest) -> SequenceId:
        return self.served.submit(request, watch=True)

    def ask(self, request: EngineRequest) -> SequenceId:
        sequence = self.submit(request)
        self.served.serve()
        return sequence

    def submit_others(self, when: str) -> None:
        """They use every slot, and leave their state there."""
        for other in self._others:
            self.served.submit(replace(other, request_id=RequestId(f"{other.request_id}, {when}")))

    def cached(self, name: str) -> int:
        return self.served.recording.num_cached_tokens[RequestId(name)]

    def tokens(self, name: str) -> list[int]:
        return self.served.recording.tokens[RequestId(name)]

    def agree(self, sequence: SequenceId, cold: SequenceId, of: "Asked | None" = None) -> bool:
        """Wherever the one was computed, the other's logits are within the tolerance. of: its engine."""
        expected = (of or self).logits.of[cold]
        ours = self.logits.of[sequence]
        return len(ours) > 0 and all(self.logits.agree(expected.get(p), x) for p, x in ours.items())


def prompt_of(subject: Subject) -> list[int]:
    return subject.tokens(18, 4 * subject.block_size + 5)


def test_18_a_hit_does_not_read_what_another_sequence_left_in_its_slot(subject: Subject) -> None:
    """Cold, again, and again after others had all the slots: tokens and logits."""
    asked, prompt = Asked(subject), prompt_of(subject)
    cold = asked.ask(greedy("cold", prompt, NUM_OUTPUT))
    again = asked.ask(greedy("again", prompt, NUM_OUTPUT))
    asked.submit_others("meanwhile")
    asked.served.serve()
    later = asked.ask(greedy("later", prompt, NUM_OUTPUT))
    assert asked.cached("cold") == 0
    for name, sequence in (("again", again), ("later", later)):
        assert asked.cached(name) == 4 * subject.block_size - subject.num_recomputed
        assert asked.tokens(name) == asked.tokens("cold")
        assert asked.agree(sequence, cold)


@pytest.mark.parametrize("is_preempted", [False, True])
def test_each_choice_of_a_prompt_is_what_it_is_alone(subject: Subject, is_preempted: bool) -> None:
    """They are sampled, so they part, and from there on a state that two of them had would be wrong."""
    choices = [
        replace(
            greedy(f"choice {seed}", prompt_of(subject), NUM_OUTPUT),
            sampling=SamplingParams(temperature=1.0, seed=seed),
            group=RequestId("all"),
        )
        for seed in range(4)
    ]
    together = Asked(subject)
    sequences = [together.submit(choice) for choice in choices]
    for _ in range(NUM_OUTPUT // 2 if is_preempted else 0):
        together.served.step()
    if is_preempted:
        together.served.preempt(sequences[0])
        together.served.preempt(sequences[2])
    together.served.serve()
    assert together.served.num_forked == len(choices) - 1
    assert len({tuple(together.tokens(choice.request_id)) for choice in choices}) == len(choices)
    for choice, sequence in zip(choices, sequences, strict=True):
        alone = Asked(subject)
        by_itself = alone.ask(choice)
        assert together.tokens(choice.request_id) == alone.tokens(choice.request_id)
        assert together.agree(sequence, by_itself, alone)


def test_the_next_turn_begins_with_the_state_where_the_last_one_ended(subject: Subject) -> None:
    subject = replace(subject, snapshot_every=0)
    asked, prompt = Asked(subject), prompt_of(subject)
    asked.ask(greedy("turn 1", prompt, NUM_OUTPUT))
    longer = [*prompt, *asked.tokens("turn 1"), 7, 8, 9]
    turn = asked.ask(greedy("turn 2", longer, 4))
    ended = (len(prompt) + NUM_OUTPUT - 1) // subject.block_size * subject.block_size
    cached = asked.cached("turn 2")
    assert cached == ended - subject.num_recomputed > len(prompt), "in the middle of what was said"
    asked.served.engine.reset_prefix_cache()
    cold = asked.ask(greedy("turn 2, cold", longer, 4))
    assert asked.cached("turn 2, cold") == 0
    assert asked.tokens("turn 2") == asked.tokens("turn 2, cold")
    assert asked.agree(turn, cold)


def test_41_who_is_preempted_while_it_speaks_goes_on_as_if_it_had_not_been(subject: Subject) -> None:
    subject = replace(subject, snapshot_every=0)
    asked, prompt = Asked(subject), prompt_of(subject)
    cold = asked.ask(greedy("cold", prompt, NUM_OUTPUT))
    asked.served.engine.reset_prefix_cache()
    sequence = asked.submit(greedy("preempted", prompt, NUM_OUTPUT))
    for at in (3, 31):
        while len(asked.tokens("preempted")) < at:
            asked.served.step()
        asked.served.preempt(sequence)
        asked.submit_others(f"after {at}")
    asked.served.serve()
    assert asked.served.recording.num_preemptions >= 2
    assert asked.tokens("preempted") == asked.tokens("cold")
    assert asked.agree(sequence, cold)


def test_an_answer_goes_on_in_another_engine_from_the_state_that_was_saved(subject: Subject) -> None:
    """Its prompt's and its output's last one, which is saved when a turn ends."""
    subject = replace(subject, snapshot_every=0)
    first, prompt = Asked(subject, Stores()), prompt_of(subject)
    cold = first.ask(greedy("whole", prompt, NUM_OUTPUT))
    elsewhere = Stores()
    elsewhere.has[OTHER] = first.stores.has[OWN]
    second, said = Asked(subject, elsewhere), first.tokens("whole")
    for heard, boundary in ((20, 4), (35, 5)):
        keys = extend_keys(root_key(b"", ""), [*prompt, *said[:heard]], subject.block_size)
        request = greedy(f"{heard} were heard", prompt, NUM_OUTPUT)
        rest = replace(request, output_token_ids=tuple(said[:heard]), sources=elsewhere.sources(keys))
        second.served.engine.reset_prefix_cache()
        sequence = second.ask(rest)
        assert second.cached(request.request_id) == boundary * subject.block_size - subject.num_recomputed
        assert second.tokens(request.request_id) == said[heard:]
        assert second.agree(sequence, cold, first)


@pytest.mark.parametrize("name", ["granite", "deepseek-v4-16"])
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("gone", [(3,), (2, 3), (0, 1, 2, 3)])
def test_25_a_store_that_has_the_blocks_and_not_their_state_is_a_shorter_hit(
    subject_named: Callable[[str], Subject], name: str, gone: Sequence[int], is_known: bool
) -> None:
    """Also where the router believes that the state is there still: then that of no other boundary came."""
    subject = subject_named(name)
    stores = Stores()
    asked, prompt = Asked(subject, stores), prompt_of(subject)
    cold = asked.ask(greedy("cold", prompt, 4))
    keys = extend_keys(root_key(b"", ""), prompt, subject.block_size)
    assert all(segment_key(key) in stores.has[OWN] for key in keys)
    for i in gone:
        del stores.has[OWN][segment_key(keys[i])]
    believed = (PrefixSource(store_id=OWN, first=0, end=4, segments=(0, 1, 2, 3)),)
    asked.served.engine.reset_prefix_cache()
    sources = stores.sources(keys) if is_known else believed
    again = asked.ask(replace(greedy("again", prompt, 4), sources=sources))
    there = 4 - len(gone) if is_known else 0
    assert asked.cached("again") == max(0, there * subject.block_size - subject.num_recomputed)
    assert asked.tokens("again") == asked.tokens("cold")
    assert asked.agree(again, cold)
