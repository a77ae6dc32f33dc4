"""`/debug/invariants`: what an operator, and a test that has ended, are told of what was not returned."""

import httpx

from shoal.kvstore.outstanding import Outstanding
from tests.api.fakes import FakeDispatcher

PATH = "/debug/invariants"
CLEAN = Outstanding(counts={"blocks": 0, "requests": 0})


def test_all_is_returned(http: httpx.Client, dispatcher: FakeDispatcher) -> None:
    dispatcher.processes = {"engine-0": CLEAN}
    response = http.get(PATH)
    assert response.status_code == 200
    said = response.json()
    assert said["clean"] is True
    counts = {"blocks": 0, "requests": 0}
    assert said["processes"]["engine-0"] == {"clean": True, "answered": True, "outstanding": counts}


def test_what_is_not_is_named(http: httpx.Client, dispatcher: FakeDispatcher) -> None:
    dispatcher.processes = {"engine-0": Outstanding(counts={"blocks": 3, "requests": 0}), "store-a": CLEAN}
    said = http.get(PATH).json()
    assert said["clean"] is False
    assert not said["processes"]["engine-0"]["clean"]
    assert said["processes"]["store-a"]["clean"]
    assert said["processes"]["engine-0"]["outstanding"]["blocks"] == 3


def test_books_that_do_not_agree_are_never_clean(http: httpx.Client, dispatcher: FakeDispatcher) -> None:
    dispatcher.processes = {"engine-0": Outstanding(counts={"blocks": 0}, broken="free [1], unowned [1, 2]")}
    said = http.get(PATH).json()
    assert said["clean"] is False
    assert said["processes"]["engine-0"]["broken"] == "free [1], unowned [1, 2]"


def test_who_does_not_answer_is_an_error_with_what_the_others_said(
    http: httpx.Client, dispatcher: FakeDispatcher
) -> None:
    dispatcher.processes = {"engine-0": CLEAN, "store-a": None}
    response = http.get(PATH)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    said = response.json()
    assert said["error"]["code"] == "no_answer"
    assert "store-a" in said["error"]["message"]
    assert said["clean"] is False
    assert said["processes"]["engine-0"]["clean"] is True
    assert said["processes"]["store-a"] == {"clean": False, "answered": False}
