"""What an engine reports, and that a router which follows it ends with the engine's own set."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.actors.engine.account import Account, Arrival, Turn
from shoal.actors.engine.prefix_changes import PrefixChanges
from shoal.actors.messages import EngineId, PrefixSnapshot, RequestId
from shoal.actors.router.prefix_feed import PrefixFeed
from shoal.kvstore.block_hash import BlockKey
from shoal.kvstore.directory import Directory

A = EngineId("engine-a")


def keys(text: str) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(letter.encode()) for letter in text)


def turn(*arrived: str, stored: str = "", removed: str = "", load: int = 0) -> Turn:
    arrivals: tuple[Arrival, ...] = tuple((RequestId(name), 1) for name in arrived)
    return Turn(
        num_requests=load,
        uncomputed_tokens=10 * load,
        tokens_per_s=500.0,
        arrived=arrivals,
        prefixes=PrefixChanges(stored=keys(stored), removed=keys(removed)),
    )


def test_turns_are_gathered_into_one_report() -> None:
    account = Account(A)
    assert account.add(turn("r1", stored="ab", load=1))
    assert account.add(turn("r2", stored="c", removed="b", load=2))
    report = account.take_report()
    assert (report.sequence, report.num_requests, report.uncomputed_tokens) == (1, 2, 20)
    assert report.tokens_per_s == 500.0
    assert report.received == (("r1", 1), ("r2", 1))
    assert (report.stored, report.removed) == (keys("ac"), keys("b"))


def test_a_report_says_everything_once() -> None:
    account = Account(A)
    account.add(turn("r1", stored="a", load=1))
    account.take_report()
    assert not account.add(turn(load=1)), "a token more for somebody is no news"
    report = account.take_report()
    assert (report.sequence, report.received, report.stored) == (2, (), ())
    assert account.add(turn(load=0))


def test_a_prefix_that_came_and_went_is_still_said_to_be_gone() -> None:
    """Else it would stay on top of a snapshot that was made in between."""
    account = Account(A)
    account.add(turn(stored="a"))
    account.add(turn(removed="a"))
    assert account.take_report().removed == keys("a")


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("change"), st.sampled_from("abcd")),
        st.tuples(st.sampled_from(["report", "lose a report", "ask", "read", "answer"]), st.just("")),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(EVENTS)
def test_a_router_that_follows_holds_what_the_engine_holds(events: list[tuple[str, str]]) -> None:
    """In any order: reports that arrive or are lost, and snapshots that are asked for, read and answered."""
    account, held = Account(A), set[str]()
    directory: Directory[EngineId] = Directory()
    feed = PrefixFeed(A, directory)
    asked: int | None = None  # the sequence when the question reached the engine
    snapshot: PrefixSnapshot | None = None

    for event, key in [*events, *[(step, "") for step in 2 * ("report", "ask", "read", "answer")]]:
        match event:
            case "change" if key in held:
                held.remove(key)
                account.add(turn(removed=key))
            case "change":
                held.add(key)
                account.add(turn(stored=key))
            case "report":
                feed.report(account.take_report())
            case "lose a report":
                account.take_report()
            case "ask" if asked is None and snapshot is None and feed.take_request():
                asked = account.sequence
            case "read" if asked is not None:
                snapshot = PrefixSnapshot(engine_id=A, sequence=asked, block_keys=keys("".join(held)))
                asked = None
            case "answer" if snapshot is not None:
                feed.restore(snapshot)
                snapshot = None
    feed.report(account.take_report())
    assert feed.following
    assert directory.keys_of(A) == set(keys("".join(held)))
