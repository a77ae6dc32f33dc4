"""Batches for tests: lines, inputs, and a server that answers, refuses and hangs up as it is told."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def line(custom_id: str, prompt: Any = "hello", **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": COMPLETIONS,
        "body": {"prompt": prompt, "max_tokens": 4, **body},
    }


def write_input(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_text().splitlines()]


def texts(path: Path) -> dict[str, str]:
    """By custom_id, which must be there once each."""
    by_id: dict[str, str] = {}
    for answer in answers(path):
        assert answer["custom_id"] not in by_id
        assert answer["error"] is None, answer
        by_id[answer["custom_id"]] = answer["response"]["body"]["choices"][0]["text"]
    return by_id


@dataclass(frozen=True, kw_only=True)
class Says:
    status: int = 200
    retry_after: str | None = None
    raw: bytes | None = None
    """In place of JSON."""
    ending: Literal["whole", "cut", "never"] = "whole"


@dataclass
class FakeServer:
    """The answer to a prompt is the prompt, reversed."""

    says: Callable[[str, int], Says] = lambda prompt, attempt: Says()
    """By prompt and attempt, from 1."""
    slots: int | None = None
    key: str | None = None
    waits_for: int = 1
    """Nobody is answered before so many are open together."""
    asked: list[str] = field(default_factory=list)
    most_open: int = 0
    _attempts: Counter[str] = field(default_factory=Counter)
    _num_open: int = 0

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_api_route("/v1/models", self._models)
        app.add_api_route("/metrics", self._metrics)
        app.add_api_route(COMPLETIONS, self._complete, methods=["POST"])
        self._all_there = asyncio.Event()
        return app

    async def _models(self, request: Request) -> Response:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "no"}}, 401)
        return JSONResponse({"object": "list", "data": []})

    async def _metrics(self) -> Response:
        if self.slots is None:
            return Response(status_code=404)
        return PlainTextResponse(f"# HELP x\nshoal_sequence_slots {float(self.slots)}\nother 1.0\n")

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        prompt = body["prompt"]
        self.asked.append(prompt)
        self._attempts[prompt] += 1
        self._num_open += 1
        self.most_open = max(self.most_open, self._num_open)
        try:
            if self._num_open == self.waits_for:
                self._all_there.set()
            await self._all_there.wait()
            return await self._answer(prompt, self.says(prompt, self._attempts[prompt]))
        finally:
            self._num_open -= 1

    async def _answer(self, prompt: str, says: Says) -> Response:
        headers = {"x-request-id": f"req-{len(self.asked)}"}
        if says.retry_after is not None:
            headers["retry-after"] = says.retry_after
        if says.ending == "never":
            await asyncio.Event().wait()
        if says.ending == "cut":
            return StreamingResponse(_cut())
        if says.raw is not None:
            return Response(says.raw, says.status, headers)
        if says.status != 200:
            error = {"message": "not now", "type": "x", "param": None, "code": f"code_{says.status}"}
            return JSONResponse({"error": error}, says.status, headers)
        usage = {
            "prompt_tokens": 10,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 4},
            "cached_tokens_by_place": {"device": 3, "own_store": 1, "other_store": 0},
        }
        choice = {"index": 0, "text": prompt[::-1], "finish_reason": "stop"}
        return JSONResponse({"choices": [choice], "usage": usage}, headers=headers)


async def _cut() -> AsyncIterator[bytes]:
    yield b'{"choices"'
    raise ConnectionResetError
