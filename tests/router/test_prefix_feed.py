"""Following an engine's numbered reports: worked examples, then any loss, delay and repetition."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.actors.messages import EngineId, EngineReport, PrefixSnapshot
from shoal.actors.router.prefix_feed import PrefixFeed
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.directory import Directory

A = EngineId("engine-a")


def keys(text: str) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(letter.encode()) for letter in text)


def report(sequence: int, stored: str = "", removed: str = "") -> EngineReport:
    return EngineReport(
        engine_id=A,
        sequence=sequence,
        num_requests=0,
        uncomputed_tokens=0,
        tokens_per_s=0.0,
        received=(),
        stored=keys(stored),
        removed=keys(removed),
    )


def snapshot(sequence: int, held: str = "") -> PrefixSnapshot:
    return PrefixSnapshot(engine_id=A, sequence=sequence, block_keys=keys(held))


class Followed:
    """A feed, what it believes, and how many snapshots it has asked for."""

    def __init__(self) -> None:
        self.directory: Directory[EngineId] = Directory()
        self.feed = PrefixFeed(A, self.directory)
        self.num_asked = 0

    def asks(self) -> bool:
        asked = self.feed.take_request()
        self.num_asked += asked
        return asked

    def hears(self, *reports: EngineReport) -> None:
        for each in reports:
            self.feed.report(each)
            self.asks()

    @property
    def held(self) -> str:
        return "".join(sorted(key.decode() for key in self.directory.keys_of(A)))


def a_follower(held: str = "", *, sequence: int = 0) -> Followed:
    followed = Followed()
    assert followed.asks()
    followed.feed.restore(snapshot(sequence, held))
    followed.num_asked = 0
    return followed


def test_reports_in_order_need_no_snapshot() -> None:
    followed = a_follower()
    followed.hears(report(1, "ab"), report(2, "c", removed="b"))
    assert (followed.held, followed.num_asked) == ("ac", 0)


def test_a_feed_begins_with_a_snapshot_whenever_its_engine_began() -> None:
    followed = Followed()
    assert followed.asks() and not followed.asks(), "once"
    followed.hears(report(8, "x"))
    assert followed.held == "", "what came before is not known yet"
    followed.feed.restore(snapshot(7, "ab"))
    assert followed.held == "abx" and followed.feed.following


def test_10_a_report_that_is_lost_costs_one_snapshot() -> None:
    followed = a_follower()
    followed.hears(report(1, "a"), report(3, "c"), report(4, "d", removed="c"), report(5, "e"))
    assert followed.num_asked == 1
    followed.feed.restore(snapshot(4, "abd"))
    followed.hears(report(6, "f"))
    assert (followed.held, followed.num_asked) == ("abdef", 1)


def test_10_a_report_that_comes_twice_costs_nothing() -> None:
    followed = a_follower()
    followed.hears(report(1, "a"), report(2, removed="a"), report(1, "a"), report(2, removed="a"))
    assert (followed.held, followed.num_asked) == ("", 0)


def test_10_reports_that_change_places_cost_one_snapshot() -> None:
    followed = a_follower()
    followed.hears(report(2, "b"), report(1, "a"), report(3, "c"))
    assert followed.num_asked == 1
    followed.feed.restore(snapshot(2, "ab"))
    assert (followed.held, followed.asks()) == ("abc", False)


def test_a_loss_while_a_snapshot_is_awaited_is_noticed_too() -> None:
    followed = Followed()
    followed.asks()
    followed.hears(report(5, "e"), report(7, "g"))
    followed.feed.restore(snapshot(4, "a"))
    assert followed.held == "ae" and followed.asks()


def test_a_snapshot_that_does_not_come_is_asked_for_again() -> None:
    followed = Followed()
    followed.asks()
    followed.feed.give_up()
    assert followed.asks()
    followed.feed.restore(snapshot(0, "a"))
    assert followed.held == "a" and not followed.asks()


def test_an_answer_to_an_earlier_question_does_not_turn_back_time() -> None:
    followed = a_follower(sequence=5)
    followed.hears(report(6, "f"))
    followed.feed.restore(snapshot(5, ""))
    assert (followed.held, followed.feed.following) == ("f", True)


CHANGES = st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), min_size=1, max_size=20)
FATES = st.lists(st.sampled_from(["arrives", "arrives", "lost", "late", "twice"]), min_size=20, max_size=20)
ANSWERED = st.lists(st.integers(0, 3), min_size=40, max_size=40)


@settings(deadline=None)
@given(CHANGES, FATES, ANSWERED)
def test_whatever_happens_to_reports_the_end_is_what_the_engine_holds(
    changes: list[tuple[str, bool]], fates: list[str], answered_after: list[int]
) -> None:
    """Each report changes one key; a snapshot is taken when asked for, and comes some reports later."""
    followed, held = Followed(), set[str]()
    late: list[EngineReport] = []
    answers: list[tuple[int, PrefixSnapshot]] = []
    delays = iter(answered_after)

    def settle(now: int) -> None:
        if followed.asks():
            answers.append((now + next(delays), snapshot(now, "".join(held))))
        while answers and answers[0][0] <= now:
            followed.feed.restore(answers.pop(0)[1])
            if followed.asks():
                answers.append((now + next(delays), snapshot(now, "".join(held))))

    settle(0)
    for sequence, ((key, stored), fate) in enumerate(zip(changes, fates, strict=False), start=1):
        (held.add if stored else held.discard)(key)
        said = report(sequence, stored=key) if stored else report(sequence, removed=key)
        match fate:
            case "lost":
                continue
            case "late":
                late.append(said)
                continue
            case "twice":
                followed.feed.report(said)
        followed.feed.report(said)
        settle(sequence)
        for each in late:
            followed.feed.report(each)
        late.clear()
        settle(sequence)
    end = len(changes) + 1
    followed.feed.report(report(end))  # an engine that changes again is heard of again
    for later in range(20):
        settle(end + later)
    assert followed.feed.following
    assert set(followed.held) == held
