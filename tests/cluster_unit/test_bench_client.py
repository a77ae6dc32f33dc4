"""The bench's client in front of a server that answers, breaks and hangs as told."""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.bench.serve.client import EventParser, Failure, Outcome, Reply, Usage, connected
from shoal.cluster.bench.serve.dialogue import Endpoint
from tests.api.server import serving
from tests.cluster_unit.fake_openai import Answer, FakeOpenAI

NEVER_S = 30.0


@contextmanager
def base_url(fake: FakeOpenAI) -> Iterator[str]:
    with serving(fake.app()) as url:
        yield f"{url}/v1"


def ask(
    url: str, *, endpoint: Endpoint = "completions", timeout_s: float = NEVER_S, times: int = 1
) -> list[Outcome]:
    body: dict[str, Any] = {"messages": []} if endpoint == "chat" else {"prompt": ""}

    async def all_at_once() -> list[Outcome]:
        async with connected(url, api_key="key", timeout_s=timeout_s) as client:
            asked = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
            return await asyncio.gather(*(client.ask(endpoint, asked) for _ in range(times)))

    return asyncio.run(all_at_once())


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_reply(endpoint: Endpoint) -> None:
    with base_url(FakeOpenAI()) as url:
        (reply,) = ask(url, endpoint=endpoint)
    assert isinstance(reply, Reply)
    assert reply.text == "one two three"
    assert len(reply.text_at) == 3  # what says only that the assistant speaks is no token
    assert list(reply.text_at) == sorted(reply.text_at)
    assert reply.ended_at >= reply.text_at[-1]
    assert reply.usage == Usage(input_tokens=10, output_tokens=3, cached_tokens=4)


def test_usage_may_leave_cached_tokens_out_or_be_absent() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": None}
    with base_url(FakeOpenAI(answer=lambda body: Answer(usage=usage))) as url:
        (reply,) = ask(url)
    assert isinstance(reply, Reply)
    assert reply.usage == Usage(input_tokens=5, output_tokens=3, cached_tokens=None)
    with base_url(FakeOpenAI(reports_usage=False)) as url:
        (reply,) = ask(url)
    assert isinstance(reply, Reply)
    assert reply.usage is None


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (Answer(status=503), "http_503", "no engine is ready"),
        (Answer(ending="error"), "error_event", "the engine is lost"),
        (Answer(ending="cut_off"), "cut_off", "without [DONE]"),
        (Answer(ending="nonsense"), "malformed_event", "nonsense"),
        (Answer(ending="break"), "disconnected", "payload"),
    ],
)
def test_what_goes_wrong_has_a_name(answer: Answer, kind: str, message: str) -> None:
    with base_url(FakeOpenAI(answer=lambda body: answer)) as url:
        (failure,) = ask(url)
    assert isinstance(failure, Failure)
    assert failure.kind == kind
    assert message in failure.message


def test_a_stream_that_hangs_is_given_up() -> None:
    with base_url(FakeOpenAI(answer=lambda body: Answer(ending="hang"))) as url:
        (failure,) = ask(url, timeout_s=0.3)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.message) == ("timeout", "no whole reply within 0.3 s")


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (failure,) = ask(f"http://127.0.0.1:{port}/v1")
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.message) == ("connect", "Connection refused")


def test_58_more_streams_than_an_http_client_opens_by_default() -> None:
    """Nobody gets a token before all 150 run: one that waits for a free connection would wait for ever."""
    with base_url(FakeOpenAI(waits_for=150)) as url:
        assert all(isinstance(outcome, Reply) for outcome in ask(url, times=150))


def test_a_server_that_closes_behind_every_stream_though_it_says_keep_alive() -> None:
    events = b'data: {"choices": [{"text": "one"}]}\n\ndata: [DONE]\n\n'
    head = b"HTTP/1.1 200 OK\r\nkeep-alive: timeout=5\r\ncontent-length: %d\r\n\r\n" % len(events)

    async def two_in_a_row() -> list[Outcome]:
        closed: asyncio.Queue[None] = asyncio.Queue()

        async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"}")
            writer.write(head + events)
            await reader.read(1)  # what comes on this connection next, or its end
            writer.close()
            await writer.wait_closed()
            closed.put_nowait(None)

        async with await asyncio.start_server(answer_once, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            url = f"http://127.0.0.1:{port}/v1"
            async with connected(url, api_key=None, timeout_s=NEVER_S) as client:
                outcomes = [await client.ask("completions", b"{}") for _ in range(2)]
            for _ in outcomes:
                await asyncio.wait_for(closed.get(), NEVER_S)
        return outcomes

    assert [isinstance(outcome, Reply) for outcome in asyncio.run(two_in_a_row())] == [True, True]


EVENTS = [b"data: one", b": a comment", b"data:two", b"event: x", b"", b"data: [DONE]"]


@given(cuts=st.lists(st.integers(0, 60)), newline=st.sampled_from([b"\n", b"\r\n"]))
def test_events_may_arrive_in_pieces_of_any_size(cuts: list[int], newline: bytes) -> None:
    stream = b"".join(event + newline for event in EVENTS)
    edges = [0, *sorted(cuts), len(stream)]
    parser = EventParser()
    pieces = (stream[begin:end] for begin, end in pairwise(edges))
    assert [data for piece in pieces for data in parser.feed(piece)] == [b"one", b"two", b"[DONE]"]
