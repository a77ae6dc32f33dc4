"""One server that speaks OpenAI's HTTP API, as cheaply as a client can listen to it.

aiohttp and not httpx: an event costs this process 40 µs instead of 130 to 180. A bench often shares its
machine with the server, and what it takes is missing there.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from shoal.cluster.bench.serve.dialogue import PATHS, Endpoint

CONNECT_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """As the server counts. None is "not reported"."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int | None = None

    @classmethod
    def read(cls, usage: Mapping[str, Any]) -> "Usage":
        details = usage.get("prompt_tokens_details") or {}
        return cls(
            input_tokens=usage["prompt_tokens"],
            output_tokens=usage["completion_tokens"],
            cached_tokens=details.get("cached_tokens"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    text: str
    text_at: tuple[float, ...]
    """When each event that carried text arrived."""
    ended_at: float
    usage: Usage | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Of one request. Counted by kind, so a kind is a word and not a sentence."""

    kind: str
    message: str
    ended_at: float


Outcome = Reply | Failure
T = TypeVar("T")


class _Refused(Exception):
    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class EventParser:
    """Server-sent events out of pieces of any size; only `data` lines matter here."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        *lines, self._tail = (self._tail + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


class ReplyReader:
    """Makes a reply of events, each with the time at which it came."""

    def __init__(self) -> None:
        self.done = False
        self._text: list[str] = []
        self._text_at: list[float] = []
        self._usage: Usage | None = None

    def read(self, data: bytes, now: float) -> None:
        """Raises _Refused if the event is an error, or none that this API knows."""
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
            if error := event.get("error"):
                raise _Refused("error_event", _error_message(error))
            if usage := event.get("usage"):
                self._usage = Usage.read(usage)
            text, thought = _spoken(event)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _Refused("malformed_event", f"{data[:200]!r}: {error!r}") from error
        if text or thought:
            self._text_at.append(now)
        if text:
            self._text.append(text)

    def reply(self, now: float) -> Reply:
        if not self.done:
            raise _Refused("cut_off", "the stream ended without [DONE]")
        return Reply(text="".join(self._text), text_at=tuple(self._text_at), ended_at=now, usage=self._usage)


def _spoken(event: Mapping[str, Any]) -> tuple[str, str]:
    """Text, and reasoning: the latter takes tokens and time but is not sent again with the history."""
    choices = event["choices"]
    if not choices:
        return "", ""
    if (delta := choices[0].get("delta")) is None:
        return choices[0]["text"] or "", ""
    return delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or ""


class OpenAIClient:
    """Never raises for what a server does: that is a Failure."""

    def __init__(
        self, http: aiohttp.ClientSession, base_url: str, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self._http = http
        self._base_url = base_url
        self._timeout_s = timeout_s
        self._clock = clock

    async def ask(self, endpoint: Endpoint, body: bytes) -> Outcome:
        return await self._attempt(self._stream(self._base_url + PATHS[endpoint], body))

    async def models(self) -> list[str] | Failure:
        return await self._attempt(self._models())

    async def _attempt(self, answer: Awaitable[T]) -> T | Failure:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except _Refused as refused:
            kind, message = refused.kind, str(refused)
        except aiohttp.ConnectionTimeoutError:
            kind, message = "connect", "no answer to the attempt to connect"
        except TimeoutError:
            kind, message = "timeout", f"no whole reply within {self._timeout_s:g} s"
        except aiohttp.ClientConnectorCertificateError as error:
            kind, message = "connect", str(error)
        except aiohttp.ClientConnectorError as error:
            kind, message = "connect", _reason(error.os_error)
        except (aiohttp.ClientError, OSError) as error:
            kind, message = "disconnected", str(error) or type(error).__name__
        return Failure(kind=kind, message=" ".join(message.split()), ended_at=self._clock())

    async def _stream(self, url: str, body: bytes) -> Reply:
        parser, reader = EventParser(), ReplyReader()
        async with self._http.post(url, data=body) as response:
            await _check(response)
            async for piece in response.content.iter_any():
                now = self._clock()
                for data in parser.feed(piece):
                    reader.read(data, now)
        return reader.reply(self._clock())

    async def _models(self) -> list[str]:
        async with self._http.get(f"{self._base_url}/models") as response:
            await _check(response)
            body = await response.read()
        try:
            return [str(model["id"]) for model in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError):
            raise _Refused("malformed", "not a list of models") from None


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    body = await response.read()
    try:
        message = _error_message(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace") or response.reason or "no reason given"
    raise _Refused(f"http_{response.status}", message)


def _reason(error: OSError) -> str:
    """Without the address, which asyncio puts in the place of the reason: the caller names the server."""
    number = error.errno or 0  # below 0 it is a resolver's
    return os.strerror(number) if number > 0 else error.strerror or str(error)


def _error_message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)


@asynccontextmanager
async def connected(
    base_url: str,
    *,
    api_key: str | None,
    timeout_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> AsyncIterator[OpenAIClient]:
    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    async with aiohttp.ClientSession(
        # A request, a connection: llama-server says keep-alive, closes behind every stream all the same, and
        # a request that takes such a connection again meets its end. The default limit is 100.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(CONNECT_DEADLINE_S, timeout_s)),
        headers=headers,
        trust_env=True,
    ) as http:
        yield OpenAIClient(http, base_url, timeout_s, clock)
