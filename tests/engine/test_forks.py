"""One prompt, several answers: who shares what, who copies what, and when a source may be given away."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import pytest
import torch

from shoal.actors.engine.block_pool import Admission, BlockId
from shoal.actors.engine.deferred_release import DeferredRelease
from shoal.actors.engine.device_memory import DeviceMemory
from shoal.actors.engine.engine import Engine
from shoal.actors.engine.model_layout import model_layout
from shoal.actors.engine.pools import Holding, Pools
from shoal.actors.engine.step import Copy
from shoal.actors.messages import ErrorKind, FinishReason, RequestId, SamplingParams
from shoal.kernels.backend import LayerKV
from tests.engine.bench import Bench, a_request, num_drawn
from tests.fake_drafts import FakeDrafts
from tests.fake_runner import generate, logprob

BLOCK_SIZE, COPY_STEP = 4, 1
PROMPT = list(range(100, 110))


class Memory(Protocol):
    """What blocks hold, in rows of one number."""

    def write(self, block: BlockId, offset: int, number: int) -> None: ...

    def read(self, block: BlockId, offset: int) -> int: ...

    def copy(self, blocks: Iterable[Copy]) -> None: ...


class Integers:
    def __init__(self) -> None:
        self._rows = [[0] * BLOCK_SIZE for _ in range(5)]

    def write(self, block: BlockId, offset: int, number: int) -> None:
        self._rows[block][offset] = number

    def read(self, block: BlockId, offset: int) -> int:
        return self._rows[block][offset]

    def copy(self, blocks: Iterable[Copy]) -> None:
        for source, to in blocks:
            self._rows[to] = list(self._rows[source])


class Tensors:
    """A device's, of two paged layers."""

    def __init__(self) -> None:
        layout = model_layout(
            [None, None], num_kv_heads=1, head_dim=4, block_size=BLOCK_SIZE, dtype="float32", max_model_len=64
        )
        self._memory = DeviceMemory(layout, num_blocks=5, max_rows=1, device=torch.device("cpu"))
        paged = [layer for layer in self._memory.layers if isinstance(layer, LayerKV)]
        self._rows = [rows for layer in paged for rows in (layer.k_PBHD, layer.v_PBHD)]

    def write(self, block: BlockId, offset: int, number: int) -> None:
        for rows_PBHD in self._rows:
            rows_PBHD[block, offset] = number

    def read(self, block: BlockId, offset: int) -> int:
        (number,) = {float(number) for rows in self._rows for number in rows[block, offset].flatten()}
        return int(number)

    def copy(self, blocks: Iterable[Copy]) -> None:
        self._memory.copy(blocks, None)


class SharingLab:
    """DeepInfer's, section 4.2: four blocks, and a prompt of ten tokens that is forked."""

    def __init__(self, memory: Memory) -> None:
        self.pools = Pools(num_blocks=5, block_size=BLOCK_SIZE, num_rows=4)
        self.deferred = DeferredRelease(self.pools)
        self.memory = memory
        self.parent = self.pools.claim(10)
        for position in range(10):
            self._write(self.parent.block_table, position, 100 + position)
        self.branch = self.pools.fork(self.parent, 10)
        self.child = self.branch.holding

    def owners(self) -> dict[int, int]:
        return {block: self.pools.blocks.num_owners(BlockId(block)) for block in range(1, 5)}

    def writer_takes_a_block(self) -> list[BlockId]:
        """A new request, as soon as there is a block for it."""
        holding = Holding()
        self.pools.resize(holding, 1)
        for position in range(len(holding.block_table) * BLOCK_SIZE):
            self._write(holding.block_table, position, 900 + position)
        return holding.block_table

    def child_reads(self) -> list[int]:
        table = self.child.block_table
        return [self.memory.read(table[p // BLOCK_SIZE], p % BLOCK_SIZE) for p in range(10)]

    def _write(self, table: list[BlockId], position: int, number: int) -> None:
        self.memory.write(table[position // BLOCK_SIZE], position % BLOCK_SIZE, number)


@pytest.fixture(params=[Integers, Tensors])
def lab(request: pytest.FixtureRequest) -> SharingLab:
    lab = SharingLab(request.param())
    assert (lab.parent.block_table, lab.child.block_table) == ([1, 2, 3], [1, 2, 4])
    assert lab.owners() == {1: 2, 2: 2, 3: 2, 4: 1}
    assert lab.branch.blocks == ((3, 4),) and lab.branch.slot is None
    lab.pools.release(lab.parent)
    assert lab.pools.blocks.num_free == 0, "blocks 1 and 2 are still the child's, 3 is pinned for the copy"
    return lab


def test_a_tail_released_before_its_copy_is_overwritten(lab: SharingLab) -> None:
    """Why there is a DeferredRelease."""
    lab.pools.release(lab.branch.sources)
    assert lab.writer_takes_a_block() == [3], "before the copy has run"
    lab.memory.copy(lab.branch.blocks)
    assert lab.child_reads() == [*range(100, 108), 900, 901]


def test_48_a_tail_released_after_its_copy_is_intact(lab: SharingLab) -> None:
    lab.deferred.release(lab.branch.sources, after_step=COPY_STEP)
    lab.pools.check([lab.child, *lab.deferred.holdings()])
    assert lab.writer_takes_a_block() == [], "the writer waits"
    lab.memory.copy(lab.branch.blocks)
    lab.deferred.step_finished(COPY_STEP)
    assert lab.writer_takes_a_block() == [3]
    assert lab.child_reads() == list(range(100, 110))


def test_what_a_fork_leaves_is_reused_tail_first_behind_the_source(lab: SharingLab) -> None:
    lab.deferred.release(lab.branch.sources, after_step=COPY_STEP)
    lab.deferred.step_finished(COPY_STEP)
    lab.pools.release(lab.child)
    assert lab.pools.blocks.allocate(4) == [3, 4, 2, 1]


def test_a_full_last_block_is_shared_and_nothing_is_copied() -> None:
    pools = Pools(num_blocks=5, block_size=4, num_rows=4)
    parent = pools.claim(8)
    branch = pools.fork(parent, 8)
    assert (branch.holding.block_table, branch.blocks, branch.sources) == ([1, 2], (), Holding())
    pools.check([parent, branch.holding])


def test_a_slot_is_copied_and_its_source_has_another_owner() -> None:
    pools = Pools(num_blocks=9, block_size=4, num_rows=4, num_slots=3)
    parent = pools.claim(6)
    branch = pools.fork(parent, 6)
    assert branch.slot == (parent.slot, branch.holding.slot) == (1, 2)
    pools.check([parent, branch.holding, branch.sources])
    pools.release(parent)
    assert pools.admission(4) is Admission.LATER, "the source is still read"
    pools.release(branch.sources)
    assert pools.admission(4) is Admission.OK


@pytest.mark.parametrize(
    ("short_of", "more"),
    [("blocks", {"num_blocks": 4}), ("rows", {"num_rows": 2}), ("slots", {"num_slots": 2})],
)
def test_a_fork_needs_a_block_for_its_tail_a_row_and_a_slot(short_of: str, more: dict[str, int]) -> None:
    enough: dict[str, Any] = {"num_blocks": 5, "num_rows": 3, "num_slots": 3}
    for counts, may in ((enough, True), (enough | more, False)):
        pools = Pools(block_size=4, **counts)
        pools.claim(10)
        assert pools.may_fork(10, headroom=0) is may, short_of
    assert not Pools(block_size=4, num_blocks=2, num_rows=2).may_fork(10, headroom=1), "for the others"


def submit(
    bench: Bench, num_choices: int, prompt: list[int] = PROMPT, max_tokens: int = 6, **more: Any
) -> None:
    """The choices of one prompt: "0", "1", ..., each with a seed of its own."""
    for i in range(num_choices):
        own: dict[str, Any] = {"sampling": SamplingParams(seed=i), "group": RequestId("all"), **more}
        bench.submit(a_request(str(i), prompt, max_tokens, **own))


def expected(num_choices: int, prompt: list[int] = PROMPT, max_tokens: int = 6) -> dict[str, list[int]]:
    return {str(i): generate(prompt, max_tokens, seed=i) for i in range(num_choices)}


def test_a_prompt_is_computed_once_and_each_choice_goes_on_by_itself() -> None:
    bench = Bench()
    submit(bench, 4)
    assert bench.step() == [(0, 10)]
    assert bench.pools.blocks.num_free == 19 - 3 - 3, "three more tails"
    assert bench.step() == [(10, 1)] * 4
    tables = [step.block_table for step in bench.runner.plans[1].sequences]
    assert [table[:2] for table in tables] == [(1, 2)] * 4 and len({table[2] for table in tables}) == 4
    bench.finish()
    assert bench.tokens == expected(4)
    assert bench.scheduler.num_forked == 3
    assert bench.drained()


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("cache", ["radix", "naive"])
@pytest.mark.parametrize(("window", "num_dropped"), [(None, 0), (1, 0), (5, 0), (5, 2), (9, 1)])
@pytest.mark.parametrize("length", [1, 3, 4, 8, 10, 12, 23])
def test_any_prompt_in_any_chunks(
    *, eager: bool, cache: Any, window: int | None, num_dropped: int, length: int
) -> None:
    for chunk in (4, 7, 24):
        bench = Bench(
            num_blocks=60,
            eager=eager,
            cache=cache,
            window=window,
            num_dropped=num_dropped,
            max_num_batched_tokens=chunk,
        )
        prompt = list(range(length))
        bench.serve("before", prompt[:9])
        submit(bench, 4, prompt)
        bench.finish()
        assert {name: bench.tokens[name] for name in "0123"} == expected(4, prompt)
        assert bench.scheduler.num_forked == 3
        assert bench.drained()


def test_each_says_of_the_prompt_what_the_first_found_cached() -> None:
    bench = Bench()
    bench.serve("before", PROMPT[:5])
    submit(bench, 3)
    bench.finish()
    assert [bench.cached[name] for name in "012"] == [4, 4, 4]


def test_choices_for_which_there_is_no_room_come_later_and_hit_the_prefix() -> None:
    bench = Bench(max_num_seqs=2)
    submit(bench, 5)
    assert bench.step() == [(0, 10)]
    bench.finish()
    assert bench.tokens == expected(5)
    assert bench.scheduler.num_forked < 4
    assert sum(s.end - s.start for plan in bench.runner.plans for s in plan.sequences if s.start == 0) == 10
    assert bench.drained()


def test_a_block_for_each_that_runs_stays_available() -> None:
    """Three blocks are the prompt's. A fork takes one more, and there are to be as many as run."""
    bench = Bench(num_blocks=7, cache="naive")
    submit(bench, 4, max_tokens=3)
    bench.step()
    assert bench.scheduler.num_forked == 1
    bench.finish()
    assert bench.tokens == expected(4, max_tokens=3)
    assert bench.scheduler.num_preemptions == 0
    assert bench.drained()


def test_whoever_waits_before_them_is_not_passed() -> None:
    bench = Bench(num_blocks=9, max_num_batched_tokens=6)
    submit(bench, 2, max_tokens=3)
    bench.step()
    bench.submit(a_request("urgent, and too long for now", list(range(24)), max_tokens=1, priority=-1))
    bench.step()
    assert bench.scheduler.num_forked == 0, "room for a tail is none for the one that comes first"
    bench.finish()
    assert {name: bench.tokens[name] for name in "01"} == expected(2, max_tokens=3)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("eager", [True, False])
def test_a_first_choice_that_leaves_at_any_time_takes_nobody_along(*, num_steps: int, eager: bool) -> None:
    """Before its prompt is computed, while that is in flight, or later."""
    for end in (lambda bench: bench.engine.abort(RequestId("0"), 1), preempt_the_first):
        bench = Bench(eager=eager, window=5, num_blocks=40, max_num_batched_tokens=6)
        submit(bench, 4, max_tokens=9)
        for _ in range(num_steps):
            bench.step()
        end(bench)
        bench.finish()
        others = {name: tokens for name, tokens in expected(4, max_tokens=9).items() if name != "0"}
        assert {name: bench.tokens[name] for name in others} == others
        assert bench.drained()


def preempt_the_first(bench: Bench) -> None:
    for sequence in bench.scheduler._running[:1]:
        bench.scheduler._preempt(sequence)


@pytest.mark.parametrize("num_steps", [2, 3, 4])
@pytest.mark.parametrize("eager", [True, False])
def test_a_choice_is_preempted_and_comes_back_by_itself(*, num_steps: int, eager: bool) -> None:
    bench = Bench(eager=eager, window=5, num_blocks=40, max_num_batched_tokens=6)
    submit(bench, 4, max_tokens=9)
    for _ in range(num_steps):
        bench.step()
    for sequence in bench.scheduler._running[2:]:
        bench.scheduler._preempt(sequence)
    bench.finish()
    assert bench.tokens == expected(4, max_tokens=9)
    assert bench.scheduler.num_preemptions == (2 if num_steps > 1 else 0)
    assert bench.drained()


def test_each_ends_with_its_own_stop_token() -> None:
    bench = Bench()
    whole = expected(3, max_tokens=9)
    stops = frozenset({whole["1"][2], whole["2"][0]}) - set(whole["0"])
    submit(bench, 3, max_tokens=9, stop_token_ids=stops)
    bench.finish()
    assert bench.tokens == {"0": whole["0"], "1": whole["1"][:3], "2": whole["2"][:1]}
    assert bench.finished["1"] is bench.finished["2"] is FinishReason.STOP
    assert bench.drained()


def test_prompt_logprobs_are_computed_once_and_said_by_each() -> None:
    bench = Bench(max_num_batched_tokens=4)
    submit(bench, 3, prompt_logprobs=0)
    bench.finish()
    assert bench.scheduler.num_forked == 2
    for name in "012":
        assert bench.prompt_logprobs[name] == [logprob(token) for token in PROMPT[1:]]
    assert bench.tokens == expected(3)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_step_that_fails_takes_along_those_whose_rows_it_computes(which: int) -> None:
    """The prompt's first chunk, its last, which is planned by then and forks, or the step behind."""
    bench = Bench(max_num_batched_tokens=6, eager=False)
    submit(bench, 3)
    for _ in range(which):
        bench.step()
    bench.runner.failures = 1
    bench.step()
    bench.finish()
    failed = {name for name, error in bench.errors.items() if error.kind is ErrorKind.INTERNAL}
    assert failed == set("012")
    assert bench.drained()


def test_a_reset_between_prompt_and_fork_keeps_old_rows_from_new_answers() -> None:
    bench = Bench(max_num_batched_tokens=6)
    submit(bench, 3)
    bench.step()
    bench.engine.reset_prefix_cache()
    bench.finish()
    starts = [s.start for plan in bench.runner.plans for s in plan.sequences if s.known_tokens]
    assert starts[:2] == [0, 0], "the second is computed from its first token, and the third forked from it"
    assert bench.scheduler.num_forked == 1
    assert bench.tokens == expected(3)


@pytest.mark.parametrize("end", [lambda e: None, lambda e: e.abort(RequestId("0"), 1)])
def test_a_fork_goes_on_with_the_blocks_that_its_parent_goes_on_with(end: Callable[[Engine], object]) -> None:
    """Somebody else has cached the same blocks while the prompt was computed: the parent's are duplicates."""
    bench = Bench(max_num_batched_tokens=20, num_blocks=40, max_num_seqs=6)
    prompt = list(range(30))
    bench.submit(a_request("other", prompt[:9], max_tokens=1))
    submit(bench, 3, prompt, prompt_logprobs=0)  # which needs every row
    bench.step()
    bench.step()
    end(bench.engine)
    bench.finish()
    assert bench.scheduler.num_forked >= 1
    assert {name: bench.tokens[name] for name in "12"} == {k: expected(3, prompt)[k] for k in "12"}
    assert bench.drained()


def test_case_31_after_many_forks_everything_is_returned() -> None:
    """Some have ended, some were aborted while copies for them were queued, some were preempted."""
    bench = Bench(num_blocks=30, window=5, eager=False, max_num_seqs=8)
    for turn in range(40):
        prompt = [turn, *range(turn % 13)]
        names = [f"{turn}-{i}" for i in range(6)]
        for i, name in enumerate(names):
            sampling = SamplingParams(seed=i)
            bench.submit(
                a_request(name, prompt, max_tokens=12, sampling=sampling, group=RequestId(str(turn)))
            )
        for _ in range(turn % 4):
            bench.step()
        for name in names[turn % 3 :: 3]:
            bench.engine.abort(RequestId(name), 1)
    bench.finish()
    assert bench.scheduler.num_forked > 80 and bench.scheduler.num_preemptions > 0
    usage = bench.pools.usage()
    assert usage.blocks["used"] == usage.segments["used"] == 0
    assert sum(usage.blocks.values()) == 30 - 1
    assert bench.drained()


def test_siblings_wait_and_count_as_one_prompt() -> None:
    bench = Bench(max_num_batched_tokens=4, max_queued_tokens=25, max_queued_requests=2, max_num_seqs=4)
    submit(bench, 8)
    assert not bench.errors, "let in together, though eight times ten tokens are more than may wait"
    assert bench.engine.uncomputed_tokens == 10
    bench.step()
    assert bench.engine.uncomputed_tokens == 6
    bench.submit(a_request("one more", [1, 2], max_tokens=1))
    assert bench.errors["one more"].kind is ErrorKind.OVERLOADED, "eight wait or run"
    bench.finish()
    assert {name: bench.tokens[name] for name in expected(8)} == expected(8)


def test_siblings_are_refused_together() -> None:
    bench = Bench(max_queued_requests=0, max_num_seqs=1)
    bench.submit(a_request("first", [1, 2]))
    submit(bench, 3)
    assert [bench.errors[name].kind for name in "012"] == [ErrorKind.OVERLOADED] * 3
    bench.finish()
    assert bench.finished["first"] is FinishReason.LENGTH


def test_a_last_row_of_a_prompt_is_forked_from_and_has_no_drafts() -> None:
    bench = Bench(max_num_batched_tokens=9, num_blocks=40, drafts=FakeDrafts(4), num_draft_tokens=4)
    submit(bench, 4)
    bench.finish()
    assert bench.scheduler.num_forked == 3
    assert bench.tokens == expected(4)


def test_forks_beside_drafts_draw_from_no_more_rows_than_a_step_computes() -> None:
    bench = Bench(
        num_blocks=200,
        max_num_seqs=8,
        max_num_batched_tokens=12,
        drafts=FakeDrafts(4, waits=0.5),
        num_draft_tokens=4,
    )
    for turn in range(40):
        prompt = [turn, turn + 1, 3, 4, 5]
        for i in range(4):
            own = {"sampling": SamplingParams(seed=i), "group": RequestId(str(turn))}
            bench.submit(a_request(f"{turn}-{i}", prompt, 20, **own))
        for _ in range(3):
            bench.step()
    bench.finish()
    assert max(map(num_drawn, bench.runner.plans)) <= 12
    assert bench.scheduler.num_forked > 10 and bench.scheduler.draft_counts().num_drafts > 50


def test_those_that_went_on_elsewhere_are_forked_as_far_as_they_say_the_same() -> None:
    bench = Bench()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        received = tuple(generate(PROMPT, 2, seed))
        sampling = SamplingParams(seed=seed)
        bench.submit(
            a_request(name, PROMPT, 6, output_token_ids=received, sampling=sampling, group=RequestId("all"))
        )
    bench.finish()
    assert bench.scheduler.num_forked == 1
    assert [bench.tokens[name] for name in "abc"] == [generate(PROMPT, 6, seed)[2:] for seed in (0, 0, 1)]


def test_48_a_planned_fork_has_the_labs_numbers_until_its_step_has_finished() -> None:
    bench = Bench(num_blocks=9, eager=False, cache="naive", max_num_seqs=2)

    def owners() -> list[int]:
        return [bench.pools.blocks.num_owners(BlockId(block)) for block in range(1, 5)]

    submit(bench, 2, max_tokens=2)
    bench.step()
    parent, child = (sequence.holding for sequence in bench.scheduler._running)
    assert (parent.block_table, child.block_table) == ([1, 2, 3], [1, 2, 4])
    assert owners() == [2, 2, 2, 1], "the copy is pending"
    bench.engine.abort(RequestId("0"), 1)
    assert owners() == [2, 2, 2, 1], "nor does the parent let go of what its step reads"
    bench.step()
    ((step,),) = [plan.sequences for plan in bench.runner.plans]
    assert step.forks[0].blocks == ((3, 4),)
    assert owners() == [1, 1, 0, 1]
    bench.finish()
    assert bench.drained()


def test_48_no_plan_gives_a_source_away_before_the_step_that_copies_it_has_finished() -> None:
    """The first choice is gone at once, and somebody wants all that it had, while the copies have not run."""
    bench = Bench(num_blocks=8, eager=False, cache="naive", window=5, max_num_seqs=2)
    submit(bench, 2, max_tokens=3)
    bench.step()
    assert bench.runner.plans == [], "nothing has been computed or copied"
    bench.engine.abort(RequestId("0"), 1)
    bench.submit(a_request("writer", list(range(50, 62)), max_tokens=1))
    assert bench.step() == [(0, 10)] and bench.pools.blocks.num_free == 8 - 1 - 3
    bench.finish()
    assert bench.tokens["1"] == generate(PROMPT, 3, seed=1)
    assert bench.tokens["writer"] == generate(range(50, 62), 1)
    assert bench.drained()
