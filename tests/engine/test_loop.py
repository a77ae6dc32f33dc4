"""The engine's thread, turned by hand."""

from collections.abc import Sequence

from shoal.actors.engine.engine import Engine
from shoal.actors.engine.loop import EngineLoop
from shoal.actors.engine.scheduler import Reply
from shoal.actors.messages import FinishReason, RequestId
from tests.engine.bench import INGRESS, Bench, a_request


class CheckedEngine(Engine):
    num_checks = 0

    def check(self) -> None:
        self.num_checks += 1
        super().check()


class Turned:
    """A loop that is never started: each turn is taken by the test."""

    def __init__(self) -> None:
        bench = Bench()
        self.engine = CheckedEngine(bench.scheduler, bench.runner, bench.device)
        self.delivered: list[tuple[list[Reply], int]] = []
        self.loop = EngineLoop(self.engine, self._deliver, idle_wait_s=0.001)

    def _deliver(self, replies: Sequence[Reply], num_requests: int) -> None:
        self.delivered.append((list(replies), num_requests))

    def submit(self, name: str, max_tokens: int) -> None:
        self.loop.do(lambda engine: engine.submit([a_request(name, [1, 2], max_tokens)], INGRESS))


def test_commands_are_done_between_steps_and_every_turn_says_how_many_requests_there_are() -> None:
    turned = Turned()
    turned.submit("a", 2)
    turned.loop.turn()
    turned.submit("b", 1)
    turned.loop.turn()
    turned.loop.turn()
    assert [(len(replies), num_requests) for replies, num_requests in turned.delivered] == [
        (0, 1),  # a's first step has begun
        (1, 2),  # while its second step computes, which is b's first
        (2, 0),
    ]
    last = {reply.chunk.request_id: reply.chunk.finish_reason for reply in turned.delivered[-1][0]}
    assert last == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}


def test_invariants_are_checked_once_when_nobody_waits() -> None:
    turned = Turned()
    for i in range(3):
        turned.submit(str(i), 1)
        turned.loop.turn()
        turned.loop.turn()
        assert turned.delivered[-1][1] == 0
        assert turned.engine.num_checks == i, "the next request may be on its way"
        turned.loop.turn()
        turned.loop.turn()
        assert turned.engine.num_checks == i + 1


def test_an_abort_is_a_turn_worth_reporting_and_the_step_in_flight_is_waited_for() -> None:
    turned = Turned()
    turned.submit("a", 5)
    turned.loop.turn()
    turned.loop.do(lambda engine: engine.abort(RequestId("a"), 1))
    turned.loop.turn()
    assert turned.delivered[-1] == ([], 0)
    turned.loop.turn()
    assert turned.engine.num_checks == 1, "it is idle, and nothing is in flight"
