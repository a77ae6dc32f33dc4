"""What each route does. A request goes: body → prompts → engine requests → token chunks → texts → answer."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from shoal.actors.ingress.answers import Answer, ChatAnswer, CompletionAnswer
from shoal.actors.ingress.body import RequestT, cache_salt_of, parse_body, read_body
from shoal.actors.ingress.dispatch import PlacedBy
from shoal.actors.ingress.edge import CLIENT_CLOSED_REQUEST
from shoal.actors.ingress.errors import not_ready, timed_out
from shoal.actors.ingress.events import DONE, KEEP_ALIVE
from shoal.actors.ingress.gate import Gate
from shoal.actors.ingress.generation import (
    Deadline,
    by_prompt,
    shown_of,
    text_deltas,
    total_usage,
    whole_choices,
)
from shoal.actors.ingress.intake import Intake, Intent
from shoal.actors.ingress.invariants import invariants
from shoal.actors.ingress.keys import Client, tenant_salt
from shoal.actors.ingress.metrics import Metrics, ModelMetrics
from shoal.actors.ingress.models import Models
from shoal.actors.ingress.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    Model,
    ModelList,
    TokenizeRequest,
)
from shoal.actors.ingress.responses import EventStream, while_connected
from shoal.actors.ingress.transcript import TextDelta, Transcript
from shoal.actors.messages import EngineId, EngineLoad, ModelCard
from shoal.kvstore.outstanding import Outstanding

INTAKE_THREADS = 4
"""A long prompt keeps one of them for seconds; the others go on."""
SHORT_BYTES = 4096
"""A body that is parsed in less time than it takes to hand it to a thread."""
MAX_NAMES_WARNED_OF = 16
"""In one answer,"""
MAX_NAMES_LOGGED = 1000
"""and in the life of a process: they are a client's words."""
_UNPRINTABLE = re.compile(r"[^!-~]")

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
GenerationT = TypeVar("GenerationT", bound=GenerationRequest)


class Endpoints:
    def __init__(
        self,
        *,
        models: Models,
        gate: Gate,
        metrics: Metrics,
        max_body_bytes: int,
        timeout_s: float,
    ) -> None:
        self._models = models
        self._began = int(time.time())
        self._gate = gate
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._timeout_s = timeout_s
        # Parsing is short, so it never waits for tokenizing: the request's own deadline is known at once.
        self._parsers = ThreadPoolExecutor(1, thread_name_prefix="parse")
        self._threads = ThreadPoolExecutor(INTAKE_THREADS, thread_name_prefix="intake")
        self._names_logged: set[str] = set()

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, ChatCompletionRequest, Intake.chat, ChatAnswer)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest, Intake.completion, CompletionAnswer)

    async def tokenize(self, request: Request) -> Response:
        return await self._converted(request, TokenizeRequest, Intake.tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._converted(request, DetokenizeRequest, Intake.detokenize)

    async def models(self) -> ModelList:
        return ModelList(data=[self._described(card) for card in self._models.cards])

    async def model(self, model_id: str) -> Model:
        return self._described(self._models.named(model_id).card)

    def _described(self, card: ModelCard) -> Model:
        return Model(id=card.name, created=self._began, max_model_len=card.max_model_len)

    async def reset_prefix_cache(self) -> Response:
        resets = [model.dispatcher.reset_prefix_cache() for model in self._models]
        if not resets or not all(await asyncio.gather(*resets)):
            return not_ready().response()
        return JSONResponse({})

    async def invariants(self) -> Response:
        said: dict[str, Outstanding | None] = {"http": self._gate.outstanding()}
        for outstanding in await asyncio.gather(*(model.dispatcher.outstanding() for model in self._models)):
            said |= outstanding
        return invariants(said)

    async def health(self) -> Response:
        """This process lives; nothing is said of engines."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        """A request could be placed now, of one model at least: if one is away, others are not to be cut off.

        Probes ask every second: a no is an answer, not a failure to log.
        """
        if self._gate.is_closed or not any(model.dispatcher.ready() for model in self._models):
            return not_ready().response()
        return JSONResponse({"status": "ready"})

    async def metrics(self) -> Response:
        models = list(self._models)
        said = await asyncio.gather(*(model.dispatcher.loads() for model in models))
        loads: dict[str, dict[EngineId, EngineLoad]] = {}
        for model, engines in zip(models, said, strict=True):
            loads.setdefault(model.card.name, {}).update(engines)
            self._metrics.of(model.card.name)  # shown before it is first asked
        exposition = self._metrics.exposition(loads)
        return Response(exposition, headers={"content-type": CONTENT_TYPE_LATEST})

    async def _generate(
        self,
        request: Request,
        body_type: type[GenerationT],
        take: Callable[[Intake, GenerationT, str], Intent],
        shape: type[Answer],
    ) -> Response:
        gateways_salt = cache_salt_of(request)
        data = await read_body(request, max_bytes=self._max_body_bytes)
        parsed = partial(parse_body, data, body_type)
        if len(data) <= SHORT_BYTES:
            body, ignored = parsed()
        else:
            body, ignored = await self._off_loop(request, self._deadline(request), self._parsers, parsed)
        self._warn(request, ignored)
        deadline = self._deadline(request, body.timeout)
        model = self._models.named(body.model)
        client: Client = request.state.client
        salt = tenant_salt(client.tenant, gateways_salt or body.cache_salt or "")

        def taken() -> tuple[Intent, list[Transcript]]:
            intent = take(model.intake, body, salt)
            return intent, [Transcript(asked, model.codec.token_bytes) for asked in intent.choices]

        intent, choices = await self._off_loop(request, deadline, self._threads, taken)
        hold = client.allowance.hold(_tokens_asked_for(body, choices))
        request.state.until_answered.callback(lambda: hold.settle(_tokens_used(request, choices)))
        answer = shape(
            intent.answer_id,
            int(time.time()),
            model.card.name,
            include_usage=body.include_usage,
            include_logprobs=intent.shows_logprobs,
        )
        metrics = self._metrics.of(model.card.name)
        placed = partial(_placed, request, metrics)
        deltas = text_deltas(model.dispatcher, choices, deadline, metrics, placed)
        if body.stream:
            return EventStream(_events(answer, choices, deltas, include_usage=body.include_usage))
        said = await while_connected(request.receive, whole_choices(deltas, len(choices)))
        shown = [said[index] for index in shown_of(choices, intent.num_shown)]
        written = partial(answer.whole, shown, total_usage(choices))
        if intent.shows_logprobs:
            content = await self._off_loop(request, deadline, self._threads, written)
        else:
            content = written()
        return Response(content, media_type="application/json")

    async def _converted(
        self, request: Request, body_type: type[RequestT], convert: Callable[[Intake, RequestT], BaseModel]
    ) -> Response:
        data = await read_body(request, max_bytes=self._max_body_bytes)

        def written() -> str:
            body, _ = parse_body(data, body_type)
            return convert(self._models.named(body.model).intake, body).model_dump_json()

        content = await self._off_loop(request, self._deadline(request), self._threads, written)
        return Response(content, media_type="application/json")

    def _deadline(self, request: Request, timeout_s: float | None = None) -> Deadline:
        timeout_s = min(timeout_s or self._timeout_s, self._timeout_s)
        return Deadline(arrived=request.state.arrived, timeout_s=timeout_s)

    async def _off_loop(
        self, request: Request, deadline: Deadline, threads: Executor, work: Callable[[], _T]
    ) -> _T:
        """Work that would keep every stream waiting if the prompt, or what is told of it, is long.

        Raises ApiError at the deadline and ClientGone when the client goes: at once, though a thread that has
        begun goes on. Work that has not begun by then never does.
        """

        async def worked() -> _T:
            return await asyncio.get_running_loop().run_in_executor(threads, work)

        try:
            async with asyncio.timeout_at(deadline.at) as limit:
                return await while_connected(request.receive, worked())
        except TimeoutError:
            if limit.expired():
                raise timed_out(deadline.timeout_s) from None
            raise

    def _warn(self, request: Request, ignored: Sequence[str]) -> None:
        """In the answer's headers every time, in the log once a name."""
        if not ignored:
            return
        names = [_UNPRINTABLE.sub("?", name[:64]) or '""' for name in ignored[:MAX_NAMES_WARNED_OF]]
        request.state.warning = "ignored unknown fields: " + ", ".join(names)
        unheard = set(names) - self._names_logged
        if unheard and len(self._names_logged) < MAX_NAMES_LOGGED:
            self._names_logged |= unheard
            logger.warning("request %s: %s", request.state.request_id, request.state.warning)


def _placed(request: Request, metrics: ModelMetrics, by: PlacedBy) -> None:
    """Each way is named once in the answer's headers, in the order in which its choices went."""
    metrics.count_placement(by)
    request.state.placed_by[by] = None


def _tokens_asked_for(body: GenerationRequest, choices: Sequence[Transcript]) -> int:
    """An answer whose length nobody has named may have all that fits: it counts when it is there."""
    prompts = sum(len(siblings[0].asked.request.prompt_token_ids) for siblings in by_prompt(choices))
    answers = sum(choice.asked.request.max_tokens for choice in choices) if body.bounds_its_answer else 0
    return prompts + answers


def _tokens_used(request: Request, choices: Sequence[Transcript]) -> int:
    """A prompt whose first token nobody waited for was worked on all the same, if it was not refused."""
    status = request.state.status
    was_refused = status is not None and status >= 400 and status not in (CLIENT_CLOSED_REQUEST, 504)
    return total_usage([choice for choice in choices if choice.has_begun or not was_refused]).total_tokens


async def _events(
    answer: Answer,
    choices: Sequence[Transcript],
    deltas: AsyncGenerator[tuple[int, TextDelta] | None, None],
    *,
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """The events that each delta brings: none if it tells nothing, several where a choice begins or ends."""
    unopened = set(range(len(choices)))
    unfinished = len(choices)
    async with aclosing(deltas):
        async for item in deltas:
            if item is None:
                yield KEEP_ALIVE
                continue
            index, delta = item
            data = b""
            if index in unopened:
                unopened.remove(index)
                data += answer.opening(index)
            data += answer.delta(index, delta)
            if delta.finish_reason is not None:
                data += answer.finish(index, delta.finish_reason)
                unfinished -= 1
            if not unfinished:
                data += answer.usage(total_usage(choices)) if include_usage else b""
                data += DONE
            yield data
