"""Offers to a node's store: each is answered, whatever becomes of the store."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from shoal.actors.engine.offers import OFFER_DEADLINE_S, Offers
from shoal.kvstore.messages import Extent
from tests.ingress.virtual_time import run_in_virtual_time
from tests.kvstore.extents import blocks


class FakeStore:
    """Answers every offer alike: with nothing, with an error, or never."""

    def __init__(self, outcome: Exception | None, *, silent: bool = False) -> None:
        self._future: Future[None] = Future()
        if outcome is not None:
            self._future.set_exception(outcome)
        elif not silent:
            self._future.set_result(None)

    @property
    def offer(self) -> "FakeStore":
        return self

    def remote(self, engine: Any, extents: Sequence[Extent]) -> "FakeStore":
        return self

    def future(self) -> Future[None]:
        return self._future


@pytest.mark.parametrize(
    ("store", "taken"),
    [
        (FakeStore(None), True),
        (FakeStore(ActorDiedError()), False),
        (FakeStore(None, silent=True), False),
        (None, False),
    ],
    ids=["takes", "dead", "silent", "none"],
)
def test_every_offer_is_answered_within_its_deadline(store: FakeStore | None, taken: bool) -> None:
    answers: list[tuple[Sequence[Extent], bool]] = []

    async def offered() -> None:
        offers = Offers("the engine", lambda extents, taken: answers.append((extents, taken)))
        offers.store = store
        offers.begin([blocks("a", 0, 1)])
        await asyncio.sleep(OFFER_DEADLINE_S + 1)
        assert not offers._under_way

    run_in_virtual_time(offered())
    assert answers == [([blocks("a", 0, 1)], taken)]
