"""Clients with keys and limits of their own, operators with the admin key, and heads of any size."""

import asyncio
import json
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from shoal.actors.ingress.edge import MAX_HEAD_BYTES, MAX_HEADERS, MAX_TARGET_BYTES
from shoal.actors.ingress.gate import GateConfig
from shoal.actors.ingress.guard import Guard
from shoal.actors.ingress.keys import KeyEntry, KeyRing, hash_of, tenant_salt
from shoal.actors.ingress.text import TextCodec
from shoal.actors.messages import ErrorKind, ModelCard, RequestError
from tests.api.fakes import FakeDispatcher, Script, guarding
from tests.api.server import serving
from tests.api.test_operations import Door
from tests.ingress.checkpoints import tokens_of
from tests.ingress.clock import Clock
from tests.ingress.virtual_time import run_in_virtual_time

COMPLETIONS = "/v1/completions"
ALPHA = tokens_of("alpha")
FOX = {"prompt": "the fox", "max_tokens": 10}
NUM_FOX = 1 + len(tokens_of("the fox"))


def as_(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class Guarded(Door):
    """A door whose clients have keys, which are their names, and a clock that stands still."""

    def __init__(self, card: ModelCard, codec: TextCodec, *entries: Mapping[str, Any], **more: Any) -> None:
        self.clock = Clock()
        self.keys = KeyRing(self.clock)
        self.tell(*entries)
        super().__init__(card, codec, guard=Guard(self.clock, keys=self.keys), **more)
        self.dispatcher.script = Script(token_ids=ALPHA)

    def tell(self, *entries: Mapping[str, Any]) -> None:
        self.keys.replace([KeyEntry.model_validate({"hash": hash_of(e["name"]), **e}) for e in entries])

    def ask(self, name: str, body: Any = FOX, **headers: str) -> httpx.Response:
        async def asked() -> httpx.Response:
            async with self.client() as client:
                return await client.post(COMPLETIONS, json=body, headers={**as_(name), **headers})

        return run_in_virtual_time(asked())

    def remaining_tokens(self) -> int:
        """Of alice."""
        client = self.keys.find(b"alice")
        assert client is not None
        return int(client.allowance.headers()["x-ratelimit-remaining-tokens"])


def test_requests_a_minute_are_counted_by_key_and_refused_as_openai_does(
    card: ModelCard, codec: TextCodec
) -> None:
    door = Guarded(card, codec, {"name": "alice", "requests_per_minute": 2}, {"name": "bob"})
    answered = door.ask("alice")
    assert answered.status_code == 200
    assert answered.headers["x-ratelimit-limit-requests"] == "2"
    assert answered.headers["x-ratelimit-remaining-requests"] == "1"
    assert answered.headers["x-ratelimit-reset-requests"] == "30s"
    assert door.ask("alice", {"prompt": 7}).status_code == 400, "which counts as well"
    refused = door.ask("alice")
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "30"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.json()["error"] == {
        "message": "Rate limit reached: this key has 2 requests a minute. Try again in 30 s.",
        "type": "requests",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    assert door.metrics()["shoal_rate_limited_total{limit=requests}"] == 1
    assert not [name for name in door.ask("bob").headers if name.startswith("x-ratelimit")]
    door.clock.now += 30
    assert door.ask("alice").status_code == 200


def test_asking_what_there_is_costs_no_request(card: ModelCard, codec: TextCodec) -> None:
    door = Guarded(card, codec, {"name": "alice", "requests_per_minute": 1})

    async def scenario() -> set[int]:
        async with door.client() as client:
            return {(await client.get("/v1/models", headers=as_("alice"))).status_code for _ in range(3)}

    assert run_in_virtual_time(scenario()) == {200}


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_those_of_usage_when_the_answer_has_ended(
    card: ModelCard, codec: TextCodec, stream: bool
) -> None:
    door = Guarded(card, codec, {"name": "alice", "tokens_per_minute": 1000})
    answered = door.ask("alice", {**FOX, "stream": stream})
    held = int(answered.headers["x-ratelimit-remaining-tokens"])
    assert answered.status_code == 200
    assert door.remaining_tokens() == 1000 - NUM_FOX - len(ALPHA)
    assert held == 1000 - NUM_FOX - 10


def test_the_prompt_and_the_answer_that_was_asked_for_must_be_left(card: ModelCard, codec: TextCodec) -> None:
    door = Guarded(card, codec, {"name": "alice", "tokens_per_minute": 60})
    door.dispatcher.script = Script(token_ids=ALPHA * 20)
    assert door.ask("alice", {**FOX, "max_tokens": 40}).status_code == 200
    refused = door.ask("alice", {**FOX, "max_tokens": 40})
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "tokens"
    assert f"asks for {NUM_FOX + 40}" in refused.json()["error"]["message"]
    assert len(door.dispatcher.opened) == 1
    door.clock.now += int(refused.headers["retry-after"])
    assert door.ask("alice", {**FOX, "max_tokens": 40}).status_code == 200


def test_a_chat_that_names_no_length_is_let_in_and_pays_afterwards(card: ModelCard, codec: TextCodec) -> None:
    door = Guarded(card, codec, {"name": "alice", "tokens_per_minute": 60})
    door.dispatcher.script = Script(token_ids=ALPHA * 20)

    async def chat() -> httpx.Response:
        async with door.client() as client:
            body = {"messages": [{"role": "user", "content": "Hello"}]}
            return await client.post("/v1/chat/completions", json=body, headers=as_("alice"))

    answered = run_in_virtual_time(chat())
    used = answered.json()["usage"]["total_tokens"]
    assert used == 22 + 40
    refused = run_in_virtual_time(chat())
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == str(22 + used - 60), "a token a second"


FULL = RequestError(kind=ErrorKind.OVERLOADED, message="full")


@pytest.mark.parametrize(
    ("script", "used"),
    [
        (Script(error=FULL), 0),
        (Script(error=RequestError(kind=ErrorKind.NEVER_FITS, message="too long")), 0),
        (Script(hangs=True), NUM_FOX),
        (Script(token_ids=ALPHA, hangs=True), NUM_FOX + len(ALPHA)),
    ],
)
def test_what_was_refused_costs_no_tokens_and_what_was_given_up_does(
    card: ModelCard, codec: TextCodec, script: Script, used: int
) -> None:
    door = Guarded(card, codec, {"name": "alice", "tokens_per_minute": 1000})
    door.dispatcher.script = script
    door.ask("alice", {**FOX, "timeout": 5})
    assert door.remaining_tokens() == 1000 - used


def test_requests_at_once_are_open_until_their_answers_end(card: ModelCard, codec: TextCodec) -> None:
    door = Guarded(card, codec, {"name": "alice", "max_concurrent": 2}, {"name": "bob"})
    door.dispatcher.script = Script(token_ids=ALPHA, pause_s=5.0)

    async def scenario() -> list[int]:
        async with door.client() as client:

            async def ask(name: str, stream: bool = False) -> httpx.Response:
                return await client.post(COMPLETIONS, json={**FOX, "stream": stream}, headers=as_(name))

            open_ones = [asyncio.create_task(ask("alice", stream)) for stream in (False, True)]
            await asyncio.sleep(7)
            statuses = [(await ask("alice")).status_code, (await ask("bob")).status_code]
            await asyncio.gather(*open_ones)
            return [*statuses, (await ask("alice")).status_code]

    assert run_in_virtual_time(scenario()) == [429, 200, 200]
    assert door.metrics()["shoal_rate_limited_total{limit=concurrent}"] == 1


def test_a_key_that_is_taken_away_is_refused_and_its_open_stream_goes_on(
    card: ModelCard, codec: TextCodec
) -> None:
    door = Guarded(card, codec, {"name": "alice"})
    door.dispatcher.script = Script(token_ids=ALPHA, pause_s=5.0)

    async def scenario() -> tuple[httpx.Response, int]:
        async with door.client() as client:
            body = {**FOX, "stream": True}
            stream = asyncio.create_task(client.post(COMPLETIONS, json=body, headers=as_("alice")))
            await asyncio.sleep(7)
            door.tell({"name": "bob"})
            late = await client.post(COMPLETIONS, json=FOX, headers=as_("alice"))
            return await stream, late.status_code

    stream, late = run_in_virtual_time(scenario())
    assert late == 401
    assert stream.text.endswith("data: [DONE]\n\n")


def test_the_openai_client_waits_and_tries_again(card: ModelCard, codec: TextCodec) -> None:
    door = Guarded(card, codec, {"name": "alice", "requests_per_minute": 1})
    with (
        serving(door.app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="alice", max_retries=0, timeout=10) as client,
    ):
        assert client.completions.create(model="org/tiny", prompt="the fox").choices[0].text == "alpha"
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="org/tiny", prompt="the fox")
    assert (refused.value.code, refused.value.type) == ("rate_limit_exceeded", "requests")
    assert refused.value.response.headers["retry-after"] == "60"


def salts(dispatcher: FakeDispatcher) -> list[str]:
    return [request.cache_salt for request in dispatcher.opened]


def test_case_79_a_salt_is_the_tenants_and_the_clients_own(card: ModelCard, codec: TextCodec) -> None:
    door = Guarded(
        card, codec, {"name": "alice", "tenant": "acme"}, {"name": "bob", "tenant": "acme"}, {"name": "eve"}
    )
    body = {"prompt": "the fox and the fox"}
    door.ask("alice", body)
    door.ask("bob", body)
    door.ask("eve", body)
    door.ask("eve", {**body, "cache_salt": "acme"})
    door.ask("eve", {**body, "cache_salt": tenant_salt("acme", "")})
    door.ask("alice", {**body, "cache_salt": "a"})
    alice, bob, *others = salts(door.dispatcher)
    assert alice == bob == tenant_salt("acme", "")
    assert len({alice, *others}) == 5
    assert len({keys[0] for keys in door.dispatcher.block_keys}) == 5, "the router is asked by the same"


def test_case_79_a_salt_in_the_header_is_that_of_the_body_and_overrules_it(
    http: httpx.Client, dispatcher: FakeDispatcher
) -> None:
    dispatcher.script = Script(token_ids=ALPHA)
    salt = "größe"
    for body, headers in (
        ({**FOX, "cache_salt": salt}, []),
        (FOX, [(b"x-cache-salt", salt.encode())]),
        ({**FOX, "cache_salt": "another"}, [(b"x-cache-salt", salt.encode())]),
    ):
        assert http.post(COMPLETIONS, json=body, headers=headers).status_code == 200
    assert salts(dispatcher) == [tenant_salt("default", salt)] * 3


@pytest.mark.parametrize(
    "headers",
    [
        [(b"x-cache-salt", b"")],
        [(b"x-cache-salt", b"a" * 257)],
        [(b"x-cache-salt", b"\xff")],
        [(b"x-cache-salt", b"a"), (b"x-cache-salt", b"a")],
    ],
)
def test_case_79_what_is_no_salt_is_refused_and_not_ignored(
    http: httpx.Client, dispatcher: FakeDispatcher, headers: list[tuple[bytes, bytes]]
) -> None:
    response = http.post(COMPLETIONS, json=FOX, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-cache-salt")
    assert not dispatcher.opened


OPERATIONS = [("POST", "/reset_prefix_cache"), ("GET", "/debug/invariants"), ("GET", "/admin/keys")]


def operate(guard: Guard | None, card: ModelCard, codec: TextCodec, **request: Any) -> set[int]:
    """The statuses of all of them."""
    door = Door(card, codec, guard=guard)
    address = request.pop("address", "127.0.0.1")
    base_url = request.pop("base_url", "http://localhost:8000")

    async def scenario() -> set[int]:
        transport = httpx.ASGITransport(app=door.app, client=(address, 1234))
        async with httpx.AsyncClient(transport=transport, base_url=base_url) as client:
            return {(await client.request(*operation, **request)).status_code for operation in OPERATIONS}

    return run_in_virtual_time(scenario())


def test_operators_need_the_admin_key_where_there_is_one(card: ModelCard, codec: TextCodec) -> None:
    guard = guarding("client", admin_key="root")
    assert operate(guard, card, codec, headers=as_("root"), address="10.0.0.7") == {200}
    for headers in ({}, as_("client"), as_("Root"), as_(hash_of("root")), {"authorization": "root"}):
        assert operate(guard, card, codec, headers=headers) == {401}


def test_nothing_is_no_key_even_where_somebody_has_hashed_it(card: ModelCard, codec: TextCodec) -> None:
    door = Door(card, codec, guard=guarding("", admin_key=""))

    async def scenario() -> set[int]:
        async with door.client() as client:
            return {
                (await client.get(path, headers=headers)).status_code
                for path in ("/v1/models", "/admin/keys")
                for headers in ({}, {"authorization": "Bearer"}, {"authorization": "Bearer  "})
            }

    assert run_in_virtual_time(scenario()) == {401}


@pytest.mark.parametrize("wrong", ["root", "", hash_of("root").upper(), hash_of("root") + "\n", "größe"])
def test_an_admin_keys_hash_that_is_none_is_refused_at_the_start(wrong: str) -> None:
    with pytest.raises(ValueError, match="admin_key_hash must be a hash"):
        Guard(Clock(), admin_key_hash=wrong)


def test_the_admin_key_is_no_clients_key(card: ModelCard, codec: TextCodec) -> None:
    door = Door(card, codec, guard=guarding("client", admin_key="root"))

    async def scenario() -> list[int]:
        async with door.client() as client:
            return [
                (await client.get("/v1/models", headers=as_(key))).status_code for key in ("client", "root")
            ]

    assert run_in_virtual_time(scenario()) == [200, 401]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.6", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("base_url", ["http://localhost:1", "http://127.0.0.1", "http://[::1]:8000"])
def test_without_an_admin_key_operators_are_those_on_this_machine(
    card: ModelCard, codec: TextCodec, address: str, base_url: str
) -> None:
    assert operate(None, card, codec, address=address, base_url=base_url) == {200}


@pytest.mark.parametrize(
    "request_",
    [
        {"address": "10.0.0.7"},
        {"address": "::2"},
        {"address": "a name"},
        {"base_url": "http://rebound.example"},
        {"headers": {"host": ""}},
        {"headers": {"origin": "http://localhost:8000"}},
        {"headers": {"x-forwarded-for": "127.0.0.1"}},
        {"headers": {"forwarded": "for=127.0.0.1"}},
    ],
)
def test_others_are_told_what_is_needed(
    card: ModelCard, codec: TextCodec, request_: Mapping[str, Any]
) -> None:
    assert operate(None, card, codec, **request_) == {403}


def test_where_clients_need_keys_nobody_is_an_operator_without_the_admin_key(
    card: ModelCard, codec: TextCodec
) -> None:
    assert operate(guarding("client"), card, codec) == {403}
    assert operate(guarding("client"), card, codec, headers=as_("client")) == {403}


def test_operators_are_let_in_where_there_is_no_room_for_clients(card: ModelCard, codec: TextCodec) -> None:
    door = Door(card, codec, limits=GateConfig(max_requests=1))
    door.dispatcher.script = Script(hangs=True)

    async def scenario() -> list[int]:
        async with door.client() as client:
            waiting = asyncio.create_task(client.post(COMPLETIONS, json={**FOX, "timeout": 5}))
            await asyncio.sleep(1)
            paths = (COMPLETIONS, "/admin/keys")
            statuses = [(await client.post(path, json=FOX)).status_code for path in paths]
            await waiting
            return statuses

    assert run_in_virtual_time(scenario()) == [503, 405], "let in, where nothing takes a POST yet"


def test_operators_see_who_may_come_in_and_no_hash(card: ModelCard, codec: TextCodec) -> None:
    entry = KeyEntry(name="alice", hash=hash_of("alice"), tenant="acme", max_concurrent=3)
    ring = KeyRing(Clock(), always=[entry])
    guard = Guard(Clock(), keys=ring, admin_key_hash=hash_of("root"))
    door = Door(card, codec, guard=guard)

    async def scenario() -> httpx.Response:
        async with door.client() as client:
            return await client.get("/admin/keys", headers=as_("root"))

    assert run_in_virtual_time(scenario()).json() == {
        "keys": [
            {
                "name": "alice",
                "tenant": "acme",
                "requests_per_minute": None,
                "tokens_per_minute": None,
                "max_concurrent": 3,
                "open_requests": 0,
            }
        ]
    }


def answer_to(url: str, head: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of a request with this head, after which its connection is closed."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(head + b"connection: close\r\n\r\n")
        received = b""
        while piece := connection.recv(65536):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body).get("error", {})


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (b"GET /v1/models HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * (MAX_HEADERS - 2), 200, None),
        (b"GET /v1/models HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * MAX_HEADERS, 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * (MAX_HEAD_BYTES // 2) + b"\r\n", 404, None),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * MAX_HEAD_BYTES + b"\r\n", 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 5 * MAX_HEAD_BYTES + b"\r\n", 431, "headers_too_large"),
        (b"GET /" + b"y" * MAX_TARGET_BYTES + b" HTTP/1.1\r\nhost: a\r\n", 414, "uri_too_long"),
        (b"GET /?" + b"y" * MAX_TARGET_BYTES + b" HTTP/1.1\r\nhost: a\r\n", 414, "uri_too_long"),
    ],
)
def test_a_head_has_a_size(
    url: str, dispatcher: FakeDispatcher, head: bytes, status: int, code: str | None
) -> None:
    told, error = answer_to(url, head)
    assert (told, error.get("code")) == (status, code)
