"""A server that speaks OpenAI's API and does what it is told: answers, refuses, breaks off, hangs."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

Ending = Literal["done", "cut_off", "break", "hang", "error", "nonsense"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    texts: tuple[str, ...] = ("one", " two", " three")
    usage: dict[str, Any] | None = None
    """None counts one token a text, and 10 of prompt with 4 of them cached."""
    ending: Ending = "done"
    status: int = 200


@dataclass
class FakeOpenAI:
    answer: Callable[[dict[str, Any]], Answer] = lambda body: Answer()
    refused_fields: frozenset[str] = frozenset()
    reports_usage: bool = True
    waits_for: int = 0
    """No stream speaks before so many run together."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_running: int = 0

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_api_route("/v1/models", self._models)
        app.add_api_route("/v1/chat/completions", self._complete, methods=["POST"])
        app.add_api_route("/v1/completions", self._complete, methods=["POST"])
        self._all_there = asyncio.Event()
        return app

    async def _models(self) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "fake"}]})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if refused := self.refused_fields & set(body):
            return _error(400, f"{', '.join(refused)}: unknown")
        answer = self.answer(body)
        if answer.status != 200:
            return _error(answer.status, "no engine is ready")
        return StreamingResponse(
            self._events("messages" in body, answer, "stream_options" in body), media_type="text/event-stream"
        )

    async def _events(self, chat: bool, answer: Answer, usage: bool) -> AsyncIterator[bytes]:
        self.num_running += 1
        if self.waits_for:
            if self.num_running == self.waits_for:
                self._all_there.set()
            await self._all_there.wait()
        if chat:
            yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for text in answer.texts:
            yield _event({"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
        match answer.ending:
            case "cut_off":
                return
            case "break":
                raise ConnectionResetError
            case "hang":
                yield b": still here\n\n"
                await asyncio.Event().wait()
            case "error":
                yield _event({"error": {"message": "the engine is lost"}})
                return
            case "nonsense":
                yield b"data: {nonsense\n\n"
            case "done":
                pass
        if usage and self.reports_usage:
            counts = answer.usage or {
                "prompt_tokens": 10,
                "completion_tokens": len(answer.texts),
                "prompt_tokens_details": {"cached_tokens": 4},
            }
            yield _event({"choices": [], "usage": counts})
        yield b"data: [DONE]\n\n"


def _event(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status_code=status)
