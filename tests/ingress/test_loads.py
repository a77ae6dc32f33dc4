"""Models whose tokenizers cannot be read: each is tried again by itself, ever more slowly."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from shoal.actors.ingress.loads import FIRST_PAUSE_S, LAST_PAUSE_S, Loads
from shoal.actors.messages import DeploymentCard, DeploymentId, ModelCard
from tests.ingress.virtual_time import run_in_virtual_time


def a_card(name: str) -> DeploymentCard:
    model = ModelCard(name=name, checkpoint="c", max_model_len=64, block_size=4, fingerprint=b"")
    return DeploymentCard(deployment_id=DeploymentId(name), model=model, weight=1)


class Reader:
    def __init__(self) -> None:
        self.bad: dict[str, str] = {}
        """By model, why."""
        self.read: list[tuple[str, float]] = []
        """And when."""

    async def load(self, card: DeploymentCard) -> None:
        name = card.model.name
        self.read.append((name, asyncio.get_running_loop().time()))
        if name in self.bad:
            raise ValueError(self.bad[name])

    def times(self, name: str) -> list[float]:
        return [at for read, at in self.read if read == name]


async def _ever_more_slowly() -> list[float]:
    reader = Reader()
    reader.bad["bad"] = "no tokenizer.json"
    loads = Loads(reader.load)
    for name in ("bad", "good"):
        loads.begin(a_card(name))
    await loads.all_tried()
    assert {known: str(why) for known, why in loads.failures.items()} == {"bad": "no tokenizer.json"}
    for _ in range(4000):  # as often as it is told that the model is served
        for name in ("bad", "good"):
            loads.begin(a_card(name))
        await asyncio.sleep(0.5)
    assert len(reader.times("good")) == 1
    times = reader.times("bad")
    del reader.bad["bad"]
    await asyncio.sleep(LAST_PAUSE_S)
    assert loads.failures == {}
    return [later - earlier for earlier, later in pairwise(times)]


def test_one_that_cannot_be_read_is_tried_ever_more_slowly_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        pauses = run_in_virtual_time(_ever_more_slowly())
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LAST_PAUSE_S
    assert [record.message for record in caplog.records] == [
        "bad is not served here: ValueError: no tokenizer.json; trying again"
    ]


async def _goes_and_comes() -> None:
    reader = Reader()
    reader.bad["m"] = "no tokenizer.json"
    loads = Loads(reader.load)
    loads.begin(a_card("m"))
    await loads.all_tried()
    loads.forget_others(frozenset())
    assert loads.failures == {}
    await asyncio.sleep(10 * FIRST_PAUSE_S)
    assert len(reader.read) == 1
    loads.begin(a_card("m"))
    await loads.all_tried()
    assert len(reader.read) == 2


async def _another_reason() -> None:
    reader = Reader()
    reader.bad["m"] = "the hub does not answer"
    loads = Loads(reader.load)
    loads.begin(a_card("m"))
    await loads.all_tried()
    reader.bad["m"] = "no tokenizer.json"
    await asyncio.sleep(1.5 * FIRST_PAUSE_S)
    assert [str(why) for why in loads.failures.values()] == ["no tokenizer.json"]
    loads.forget_others(frozenset())


@pytest.mark.parametrize("scenario", [_goes_and_comes, _another_reason])
def test_what_is_told_no_more_is_given_up(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_in_virtual_time(scenario())
