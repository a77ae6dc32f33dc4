"""The operator's endpoints over a cluster that a test plays."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
from ray.exceptions import ActorUnavailableError, RayTaskError

from shoal.actors.ingress.app import create_app
from shoal.actors.ingress.remote_cluster import RemoteCluster
from shoal.actors.ingress.text import TextCodec
from shoal.actors.messages import ModelCard
from tests.api.fakes import FakeDispatcher, guarding, serving_one

KEY = "sk-admin"


class FakeSupervisor:
    """Each method is remote, and answers at once."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.fails: Exception | None = None

    def __getattr__(self, name: str) -> "_Method":
        return _Method(self, name)


class _Method:
    def __init__(self, supervisor: FakeSupervisor, name: str) -> None:
        self._supervisor = supervisor
        self._name = name

    def remote(self, *args: Any) -> "_Method":
        if self._name != "describe":
            self._supervisor.told.append((self._name, *args))
        return self

    def future(self) -> Future[Any]:
        answer: Future[Any] = Future()
        if self._supervisor.fails:
            answer.set_exception(self._supervisor.fails)
        else:
            answer.set_result({"name": "default"} if self._name == "describe" else None)
        return answer


class Admin:
    def __init__(self, card: ModelCard, codec: TextCodec) -> None:
        self.supervisor = FakeSupervisor()
        self.cluster = RemoteCluster()
        self.cluster.introduce(self.supervisor)
        models = serving_one(card, codec, FakeDispatcher())
        self.app = create_app(models=models, cluster=self.cluster, guard=guarding(admin_key=KEY))

    def ask(self, method: str, path: str, body: Any = None, key: str = KEY) -> httpx.Response:
        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            headers = {"authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(
                transport=transport, base_url="http://shoal", headers=headers
            ) as client:
                return await client.request(method, f"/admin/{path}", json=body)

        return asyncio.run(asked())


@pytest.fixture
def admin(card: ModelCard, codec: TextCodec) -> Admin:
    return Admin(card, codec)


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("scale", {"engines": 3}, ("scale", None, 3)),
        ("scale", {"engines": 0, "model": "org/tiny"}, ("scale", "org/tiny", 0)),
        ("drain", {"node": "ab12"}, ("drain_node", "ab12")),
        ("drain", {"node": "ab12", "undo": True}, ("undrain_node", "ab12")),
        ("drain", {"engine": "engine-0"}, ("drain_engine", "engine-0")),
    ],
)
def test_the_supervisor_is_told_and_the_answer_is_how_things_stand(
    admin: Admin, path: str, body: Mapping[str, Any], told: tuple[Any, ...]
) -> None:
    response = admin.ask("POST", path, body)
    assert (response.status_code, response.json()) == (200, {"name": "default"})
    assert admin.supervisor.told == [told]


def test_the_end_is_answered_before_it_comes(admin: Admin) -> None:
    assert admin.ask("POST", "stop", {}).status_code == 202
    assert admin.supervisor.told == [("stop",)]


def test_nothing_is_said_without_the_key(admin: Admin) -> None:
    assert admin.ask("GET", "status", key="wrong").status_code == 401
    assert admin.ask("POST", "stop", {}, key="wrong").status_code == 401
    assert admin.supervisor.told == []


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("scale", {}, "engines: Field required."),
        ("scale", {"engines": -1}, "engines: Input should be greater than or equal to 0."),
        ("scale", {"engines": "2"}, "engines: Input should be a valid integer."),
        ("scale", {"engines": 2, "models": "m"}, "models: Extra inputs are not permitted."),
        ("scale", [], "The body must be a JSON object."),
        ("drain", {}, "Value error, either node or engine must be given."),
        ("drain", {"node": "a", "engine": "b"}, "Value error, either node or engine must be given."),
        ("drain", {"engine": "b", "undo": True}, "Value error, an engine that drains cannot be called back."),
    ],
)
def test_what_cannot_be_meant_is_refused(admin: Admin, path: str, body: Any, said: str) -> None:
    response = admin.ask("POST", path, body)
    assert (response.status_code, response.json()["error"]["message"]) == (400, said)
    assert admin.supervisor.told == []


def test_what_the_supervisor_refuses_is_said_in_its_words(admin: Admin) -> None:
    cause = ValueError("model: 'x' is not served here: choose org/tiny")
    admin.supervisor.fails = RayTaskError("scale", "trace", cause)  # type: ignore[no-untyped-call]
    response = admin.ask("POST", "scale", {"engines": 1, "model": "x"})
    assert (response.status_code, response.json()["error"]["message"]) == (400, str(cause))


@pytest.mark.parametrize("failure", [TimeoutError(), ActorUnavailableError("away", None)])
def test_a_supervisor_that_is_away_is_a_503(admin: Admin, failure: Exception) -> None:
    admin.supervisor.fails = failure
    response = admin.ask("GET", "status")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_answer")


def test_before_it_was_introduced_there_is_none_to_ask(admin: Admin) -> None:
    admin.cluster.introduce(None)
    assert admin.ask("GET", "status").status_code == 503
