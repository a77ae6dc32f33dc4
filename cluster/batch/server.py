"""A server that speaks OpenAI's HTTP API, as a batch uses it: whole answers over lasting connections."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from pydantic_core import from_json, to_json

from shoal.cluster.batch.index import BatchError
from shoal.cluster.batch.lines import Problem, Question, Reply

CONNECT_DEADLINE_S = 10.0
SHORT_DEADLINE_S = 10.0
"""For what is answered without an engine."""
TRANSIENT = frozenset({408, 429, 500, 502, 503})
"""Another attempt may do better. A 504 is none: the answer took its time, and would again."""
FAILED_INSIDE = frozenset({408, 500})
WRONG_KEY = frozenset({401, 403})
_SLOTS = re.compile(rb"^shoal_sequence_slots(?:\{.*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Nothing that lasts. `outcome` is what to write if it was the last attempt."""

    outcome: Reply | Problem
    retry_after_s: float = 0.0
    """The least that the server asks for."""

    @property
    def is_about_the_line(self) -> bool:
        """The server is there, and failed at this one."""
        return isinstance(self.outcome, Reply) and self.outcome.status in FAILED_INSIDE


class Server:
    def __init__(self, http: aiohttp.ClientSession, url: str, timeout_s: float) -> None:
        self._http = http
        self._url = url
        self._timeout_s = timeout_s

    async def ask(self, question: Question) -> Reply | Problem | Refusal:
        """Raises BatchError when the server refuses the key: then no other line will be answered."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._post(question)
        except aiohttp.ClientError as error:  # first: that of a connect is a TimeoutError as well
            return _cut_off(error)
        except TimeoutError:
            return Problem(code="timeout", message=f"no answer within {self._timeout_s:g} seconds")
        except OSError as error:
            return _cut_off(error)

    async def _post(self, question: Question) -> Reply | Problem | Refusal:
        body = to_json(question.body)
        async with self._http.post(f"{self._url}{question.url}", data=body) as response:
            data = await response.read()
            status, headers = response.status, response.headers
        if status in WRONG_KEY:
            raise BatchError(f"{self._url} refuses the key ({status}): check --api-key")
        answer = _json_object(data)
        if answer is None:
            text = data[:500].decode(errors="replace")
            if status == 200:
                return Problem(code="malformed_answer", message=f"not a JSON object: {text}")
            answer = {"error": {"message": text, "type": "malformed_answer", "param": None, "code": None}}
        reply = Reply(status=status, request_id=headers.get("x-request-id", ""), body=answer)
        if status in TRANSIENT:
            return Refusal(outcome=reply, retry_after_s=_seconds(headers.get("retry-after", "")))
        return reply

    async def meet(self) -> None:
        """Whether this is a server at all, before a line is asked. Raises BatchError."""
        try:
            async with (
                asyncio.timeout(SHORT_DEADLINE_S),
                self._http.get(f"{self._url}/v1/models") as response,
            ):
                status = response.status
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
            raise BatchError(f"no server at {self._url} ({_reason(error)}): check --url") from error
        if status in WRONG_KEY:
            raise BatchError(f"{self._url} refuses the key ({status}): check --api-key")
        if status == 404:
            raise BatchError(f"{self._url}/v1/models is not there: check --url")

    async def num_slots(self) -> int | None:
        """Sequences that its engines run at once, all together; None where it does not tell."""
        try:
            status, data = await self._get("/metrics")
        except (aiohttp.ClientError, OSError):
            return None
        found = _SLOTS.search(data) if status == 200 else None
        return None if found is None else int(float(found[1])) or None

    async def _get(self, path: str) -> tuple[int, bytes]:
        async with asyncio.timeout(SHORT_DEADLINE_S), self._http.get(f"{self._url}{path}") as response:
            return response.status, await response.read()


def _cut_off(error: Exception) -> Refusal:
    return Refusal(outcome=Problem(code="connection_error", message=_reason(error)))


def _json_object(data: bytes) -> dict[str, Any] | None:
    try:
        value = from_json(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _seconds(header: str) -> float:
    """0 for what is no number: a date, or nothing."""
    return float(header) if re.fullmatch(r"\d{1,6}(\.\d+)?", header) else 0.0


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and (cause.errno or 0) > 0:  # asyncio puts an address in its place
        return os.strerror(cause.errno or 0)
    return " ".join(str(cause).split()) or type(cause).__name__


@asynccontextmanager
async def connected(url: str, *, api_key: str | None, timeout_s: float) -> AsyncIterator[Server]:
    """url: with or without the /v1 at its end."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--url {url} must begin with http:// or https://")
    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),  # how many there are is decided elsewhere
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(CONNECT_DEADLINE_S, timeout_s)),
        headers=headers,
        trust_env=True,
    ) as http:
        yield Server(http, url.rstrip("/").removesuffix("/v1"), timeout_s)
