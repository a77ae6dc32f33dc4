"""How an answer was placed, as its client and its operator see it."""

import httpx
import pytest

from shoal.actors.ingress.dispatch import PlacedBy
from shoal.actors.messages import ErrorKind, RequestError
from tests.api.fakes import FakeDispatcher, Script
from tests.ingress.checkpoints import tokens_of

ANSWER = tokens_of("alpha")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("by", "said"),
    [
        (PlacedBy.PREFIX, "prefix"),
        (PlacedBy.LOAD, "load"),
        (PlacedBy.NO_KEYS, "blind; reason=no_keys"),
        (PlacedBy.STALE_INDEX, "blind; reason=stale_index"),
        (PlacedBy.ROUTER_AWAY, "blind; reason=router_away"),
    ],
)
def test_every_answer_says_what_its_placement_went_by(
    http: httpx.Client, dispatcher: FakeDispatcher, by: PlacedBy, said: str, stream: bool
) -> None:
    dispatcher.script = Script(token_ids=ANSWER, placed_by=(by,))
    response = http.post("/v1/completions", json={"prompt": "the fox", "stream": stream})
    assert response.headers["x-shoal-placement"] == said


def test_several_prompts_name_each_way_once(http: httpx.Client, dispatcher: FakeDispatcher) -> None:
    dispatcher.script = Script(token_ids=ANSWER, placed_by=(PlacedBy.PREFIX, PlacedBy.ROUTER_AWAY))
    response = http.post("/v1/completions", json={"prompt": ["the", "fox"]})
    assert response.headers["x-shoal-placement"] == "prefix, blind; reason=router_away"


def test_what_was_not_placed_says_nothing(http: httpx.Client, dispatcher: FakeDispatcher) -> None:
    error = RequestError(kind=ErrorKind.NO_ENGINE, message="")
    dispatcher.script = Script(error=error, placed_by=())
    response = http.post("/v1/completions", json={"prompt": "the fox"})
    assert response.status_code == 503
    assert "x-shoal-placement" not in response.headers


def test_case_14_placements_are_counted_by_what_they_went_by(
    http: httpx.Client, dispatcher: FakeDispatcher
) -> None:
    def counted() -> dict[str, float]:
        lines = http.get("/metrics").text.splitlines()
        series = [line.rsplit(" ", 1) for line in lines if line.startswith("shoal_placements_total{")]
        return {name.partition('by="')[2].partition('"')[0]: float(count) for name, count in series}

    before = counted()
    assert before.keys() == set(PlacedBy), "shown from the start"
    dispatcher.script = Script(token_ids=ANSWER, placed_by=(PlacedBy.NO_KEYS, PlacedBy.PREFIX))
    http.post("/v1/completions", json={"prompt": "the fox"})
    after = counted()
    assert {by: after[by] - before[by] for by in after} == {
        "prefix": 1.0,
        "load": 0.0,
        "no_keys": 1.0,
        "stale_index": 0.0,
        "router_away": 0.0,
    }
