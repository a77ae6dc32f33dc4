"""What the bench sends: the same from the same seed, and prefixes where prefixes are promised."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.bench.serve.dialogue import Dialogue, Endpoint
from shoal.cluster.bench.serve.workload import FIRST_ID, LAST_ID, Lengths, Workload, WorkloadConfig


def workload(**config: Any) -> Workload:
    return Workload(WorkloadConfig(**config))


def test_a_session_does_not_depend_on_what_was_drawn_before() -> None:
    assert workload().session(3) == workload().session(3)
    drawn = workload()
    assert [drawn.session(index) for index in range(4)][3] == workload().session(3)
    assert workload(seed=1).session(3) != workload().session(3)


def test_random_requests_share_nothing() -> None:
    first, second = workload().session(0), workload().session(1)
    assert first.prefix == second.prefix == ""
    assert first.turns[0].passage != second.turns[0].passage


def test_lengths_are_in_words_or_token_ids() -> None:
    (turn,) = workload(input_len=Lengths(7, 7)).session(0).turns
    assert isinstance(turn.passage, str)
    assert len(turn.passage.split()) == 7
    (turn,) = workload(input_len=Lengths(7, 7), prompt_format="token_ids").session(0).turns
    assert len(turn.passage) == 7
    assert all(isinstance(token, int) and FIRST_ID <= token <= LAST_ID for token in turn.passage)


def test_a_range_of_lengths_is_drawn_from_end_to_end() -> None:
    rng = random.Random(0)
    assert {Lengths.parse("3:5").draw(rng) for _ in range(50)} == {3, 4, 5}
    assert {Lengths.parse("3").draw(rng) for _ in range(5)} == {3}


@pytest.mark.parametrize("text", ["", "0", "5:3", "-1", "1.5", "a", "3:"])
def test_what_is_not_a_length(text: str) -> None:
    with pytest.raises(ValueError, match="is not a length"):
        Lengths.parse(text)


def test_sessions_of_a_group_share_its_prefix() -> None:
    drawn = workload(name="shared-prefix", groups=3, prefix_len=20)
    prefixes = [drawn.session(index).prefix for index in range(6)]
    assert prefixes[:3] == prefixes[3:]
    assert len(set(prefixes)) == 3
    assert all(isinstance(prefix, str) and len(prefix.split()) == 20 for prefix in prefixes)


def test_a_conversation_has_turns() -> None:
    session = workload(name="multi-turn", turns=3).session(0)
    assert len({turn.passage for turn in session.turns}) == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "random", "turns": 4}, "--turns means nothing to --workload random"),
        ({"name": "shared-prefix", "groups": 0}, "--groups 0 is too small"),
        ({"name": "shared-prefix", "prefix_len": -1}, "--prefix-len -1 is too small"),
        ({"name": "multi-turn", "prompt_format": "token_ids"}, "needs --prompt-format text"),
        ({"name": "sonnet"}, "choose one of random, shared-prefix, multi-turn"),
    ],
)
def test_what_makes_no_sense_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorkloadConfig(**config)


def test_a_chat_resends_its_history_with_the_real_replies() -> None:
    session = workload(name="multi-turn", turns=2, prefix_len=5).session(0)
    dialogue = Dialogue(session, "chat")
    first = dialogue.ask(session.turns[0])
    dialogue.hear("the reply")
    second = dialogue.ask(session.turns[1])
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert second["messages"] == [
        *first["messages"],
        {"role": "assistant", "content": "the reply"},
        {"role": "user", "content": session.turns[1].passage},
    ]


def test_token_ids_are_one_list() -> None:
    session = workload(name="shared-prefix", prefix_len=5, prompt_format="token_ids").session(0)
    asked = Dialogue(session, "completions").ask(session.turns[0])
    assert asked["prompt"] == (*session.prefix, *session.turns[0].passage)
    assert asked["max_tokens"] == session.turns[0].output_len


@given(replies=st.lists(st.text(), min_size=3, max_size=3), endpoint=st.sampled_from(["chat", "completions"]))
def test_what_was_sent_and_said_begins_what_is_sent_next(replies: list[str], endpoint: Endpoint) -> None:
    session = workload(name="multi-turn", turns=4, input_len=Lengths(3, 3)).session(0)
    dialogue = Dialogue(session, endpoint)
    sent = dialogue.ask(session.turns[0])
    for turn, reply in zip(session.turns[1:], replies, strict=True):
        dialogue.hear(reply)
        before, sent = sent, dialogue.ask(turn)
        if endpoint == "chat":
            said = [*before["messages"], {"role": "assistant", "content": reply}]
            assert sent["messages"][: len(said)] == said
        else:
            assert sent["prompt"].startswith(before["prompt"] + reply)
