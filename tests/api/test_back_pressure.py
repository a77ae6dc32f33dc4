"""Too much at once, and the end of it all: who is refused, what with, and what is left behind."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx
import pytest
from starlette.types import Message

from shoal.actors.ingress.edge import PARTING_S
from shoal.actors.ingress.gate import GateConfig
from shoal.actors.ingress.text import TextCodec
from shoal.actors.messages import ErrorKind, ModelCard, RequestError
from tests.api.fakes import Script
from tests.api.test_operations import Door
from tests.ingress.checkpoints import tokens_of
from tests.ingress.virtual_time import run_in_virtual_time

COMPLETIONS = "/v1/completions"
HALF = json.dumps({"prompt": "", "timeout": 5, "user": "x" * 500}).encode()
"""A body of more than half of what fits."""
MAX_BYTES = 1000

Send = Callable[[httpx.AsyncClient, bytes], Coroutine[Any, Any, httpx.Response]]


async def declared(client: httpx.AsyncClient, body: bytes) -> httpx.Response:
    return await client.post(COMPLETIONS, content=body)


async def in_parts(client: httpx.AsyncClient, body: bytes) -> httpx.Response:
    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    return await client.post(COMPLETIONS, content=parts())


@pytest.fixture
def door(card: ModelCard, codec: TextCodec) -> Door:
    return Door(card, codec, limits=GateConfig(max_bytes=MAX_BYTES))


async def http_of(client: httpx.AsyncClient) -> dict[str, int]:
    said = (await client.get("/debug/invariants")).json()
    counts: dict[str, int] = said["processes"]["http"]["outstanding"]
    return counts


@pytest.mark.parametrize("send", [declared, in_parts])
def test_bodies_have_a_bound_together(door: Door, send: Send) -> None:
    door.dispatcher.script = Script(hangs=True)

    async def scenario() -> httpx.Response:
        async with door.client() as client:
            first = asyncio.create_task(send(client, HALF))
            await asyncio.sleep(1)
            assert await http_of(client) == {"requests": 1, "body_bytes": len(HALF)}
            refused = await send(client, HALF)
            assert (await send(client, b'{"prompt": 7}')).status_code == 400, "there is room for a small one"
            await first
            door.dispatcher.script = Script()
            assert (await send(client, HALF)).status_code == 200
            assert await http_of(client) == {"requests": 0, "body_bytes": 0}
        return refused

    refused = run_in_virtual_time(scenario())
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "overloaded"
    assert int(refused.headers["retry-after"]) >= 1


def test_one_that_comes_alone_is_let_in(door: Door) -> None:
    assert door.post(COMPLETIONS, {"prompt": "", "user": "x" * 2 * MAX_BYTES}).status_code == 200


def test_who_is_refused_comes_back_as_fast_as_answers_end(card: ModelCard, codec: TextCodec) -> None:
    """By the engines here; refusals themselves are no answers."""
    now = 0.0
    door = Door(card, codec, clock=lambda: now)
    full = Script(error=RequestError(kind=ErrorKind.OVERLOADED, message="full"))
    door.dispatcher.scripts = {(0, *tokens_of("the")): full}

    async def scenario() -> list[str]:
        nonlocal now
        async with door.client() as client:
            door.dispatcher.script = Script(hangs=True)
            body = {"prompt": "", "timeout": 5}
            waiting = asyncio.create_task(client.post(COMPLETIONS, json=body))
            await asyncio.sleep(1)
            door.dispatcher.script = Script(token_ids=tokens_of("alpha"))
            for _ in range(2):
                now += 3.0
                assert (await client.post(COMPLETIONS, json={"prompt": ""})).status_code == 200
            refused = [await client.post(COMPLETIONS, json={"prompt": "the"}) for _ in range(4)]
            await waiting
        assert {response.status_code for response in refused} == {503}
        return [response.headers["retry-after"] for response in refused]

    assert run_in_virtual_time(scenario()) == ["2", "4", "6", "8"], "one in two seconds"


def test_at_the_stop_a_whole_answer_is_a_503_after_the_grace_and_its_engine_is_free(door: Door) -> None:
    door.dispatcher.script = Script(token_ids=tokens_of("alpha"), hangs=True)

    async def scenario() -> httpx.Response:
        async with door.client() as client:
            body = {"prompt": "", "timeout": 60}
            asked = asyncio.create_task(client.post(COMPLETIONS, json=body))
            await asyncio.sleep(1)
            door.app.state.gate.close(3.0)
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).status_code == 200
            late = await client.post(COMPLETIONS, json=body)
            assert (late.status_code, late.json()["error"]["code"]) == (503, "stopping")
            response = await asked
            assert asyncio.get_running_loop().time() == 4.0
            assert await http_of(client) == {"requests": 0, "body_bytes": 0}
        return response

    response = run_in_virtual_time(scenario())
    assert response.status_code == 503
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("service_unavailable_error", "stopping")
    assert response.headers["retry-after"] == "1"
    assert response.headers["x-request-id"]
    assert door.dispatcher.aborted == door.dispatcher.opened
    assert door.metrics()["shoal_request_errors_total{code=stopping}"] == 2


def test_at_the_stop_a_stream_ends_with_an_event_and_one_that_is_done_in_time_as_ever(door: Door) -> None:
    alpha = tokens_of("alpha")
    door.dispatcher.script = Script(token_ids=alpha, hangs=True)
    prompt = (0, *tokens_of("the"))
    door.dispatcher.scripts = {prompt: Script(token_ids=alpha, pause_s=1.0)}

    async def scenario() -> tuple[httpx.Response, httpx.Response]:
        async with door.client() as client:
            cut = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "", "stream": True}))
            ends = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "the", "stream": True}))
            await asyncio.sleep(0.5)
            door.app.state.gate.close(5.0)
            return await cut, await ends

    cut, ends = run_in_virtual_time(scenario())
    assert ends.text.endswith("data: [DONE]\n\n")
    *said, last, end = cut.text.split("\n\n")
    assert (cut.status_code, len(said), end) == (200, len(alpha), "")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"


def test_at_the_stop_nobody_is_waited_for_who_does_not_read(door: Door) -> None:
    door.dispatcher.script = Script(token_ids=tokens_of("alpha"), hangs=True)
    body = json.dumps({"prompt": "", "stream": True}).encode()
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": COMPLETIONS}
    scope |= {"headers": [], "query_string": b""}

    async def scenario() -> float:
        requests = asyncio.Queue[Message]()
        requests.put_nowait({"type": "http.request", "body": body})

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        asked = asyncio.create_task(door.app(scope, requests.get, send))
        await asyncio.sleep(1)
        door.app.state.gate.close(3.0)
        await asked
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(scenario()) == 4.0 + PARTING_S


def test_a_gate_for_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one request"):
        GateConfig(max_requests=0)
