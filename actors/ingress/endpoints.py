"""What each route does. A request goes: body → prompt → engine request → token chunks → text → answer."""

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from shoal.actors.ingress.answers import DONE, Answer, ChatAnswer, CompletionAnswer
from shoal.actors.ingress.body import read_request
from shoal.actors.ingress.dispatch import Dispatcher
from shoal.actors.ingress.errors import not_ready, unknown_model
from shoal.actors.ingress.generation import (
    TextDelta,
    Transcript,
    first_attempt,
    output_budget,
    text_deltas,
    whole_text,
)
from shoal.actors.ingress.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    Model,
    ModelList,
)
from shoal.actors.ingress.responses import EventStream, while_connected
from shoal.actors.ingress.stop_strings import StopStrings
from shoal.actors.ingress.text import TextCodec
from shoal.actors.messages import EngineRequest, ModelCard, RequestId


class Endpoints:
    def __init__(
        self, *, model: ModelCard, codec: TextCodec, dispatcher: Dispatcher, max_body_bytes: int
    ) -> None:
        self._card = model
        self._codec = codec
        self._dispatcher = dispatcher
        self._max_body_bytes = max_body_bytes
        self._model = Model(id=model.name, created=int(time.time()), max_model_len=model.max_model_len)

    async def chat_completions(self, request: Request) -> Response:
        body = await read_request(request, ChatCompletionRequest, max_bytes=self._max_body_bytes)
        self._check_model(body.model)
        prompt = await self._codec.encode_chat(body.messages)
        max_tokens = output_budget(
            len(prompt),
            wanted=body.max_completion_tokens or body.max_tokens,
            default=None,
            max_model_len=self._card.max_model_len,
            param="messages",
        )
        asked = self._engine_request("chatcmpl", body, prompt, max_tokens)
        return await self._answer(request, body, asked, ChatAnswer)

    async def completions(self, request: Request) -> Response:
        body = await read_request(request, CompletionRequest, max_bytes=self._max_body_bytes)
        self._check_model(body.model)
        prompt = await self._codec.encode_prompt(body.prompt)
        max_tokens = output_budget(
            len(prompt),
            wanted=body.max_tokens,
            default=DEFAULT_COMPLETION_TOKENS,
            max_model_len=self._card.max_model_len,
            param="prompt",
        )
        asked = self._engine_request("cmpl", body, prompt, max_tokens)
        return await self._answer(request, body, asked, CompletionAnswer)

    async def models(self) -> ModelList:
        return ModelList(data=[self._model])

    async def model(self, model_id: str) -> Model:
        self._check_model(model_id)
        return self._model

    async def health(self) -> Response:
        """This process lives; nothing is said of engines."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        """A request could be placed now. Probes ask every second: a no is an answer, not a failure to log."""
        if not self._dispatcher.ready():
            return not_ready().response()
        return JSONResponse({"status": "ready"})

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._card.name:
            raise unknown_model(name)

    def _engine_request(
        self, prefix: str, body: GenerationRequest, prompt: tuple[int, ...], max_tokens: int
    ) -> EngineRequest:
        return first_attempt(
            body,
            request_id=RequestId(f"{prefix}-{secrets.token_hex(16)}"),
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            stop_token_ids=self._codec.stop_token_ids,
        )

    async def _answer(
        self, request: Request, body: GenerationRequest, asked: EngineRequest, shape: type[Answer]
    ) -> Response:
        answer = shape(asked.request_id, int(time.time()), self._card.name, include_usage=body.include_usage)
        detokenizer = self._codec.detokenizer(asked.prompt_token_ids)
        transcript = Transcript(asked, detokenizer, StopStrings(body.stop or ()))
        deltas = text_deltas(self._dispatcher, asked, transcript)
        if body.stream:
            return EventStream(_events(answer, transcript, deltas, include_usage=body.include_usage))
        text, finish_reason = await while_connected(request.receive, whole_text(deltas))
        return Response(answer.whole(text, finish_reason, transcript.usage), media_type="application/json")


async def _events(
    answer: Answer,
    transcript: Transcript,
    deltas: AsyncGenerator[TextDelta, None],
    *,
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """The events that each delta brings: none if it has no text, several at the beginning and at the end."""
    data = answer.opening()
    async with aclosing(deltas):
        async for delta in deltas:
            if delta.text:
                data += answer.text(delta.text)
            if delta.finish_reason is not None:
                data += answer.finish(delta.finish_reason)
                data += answer.usage(transcript.usage) if include_usage else b""
                data += DONE
            yield data
            data = b""
