"""The tokens of one answer: asked for at the dispatcher, and passed on as text while they come."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from itertools import groupby

from shoal.actors.ingress.dispatch import Dispatcher, PlacedBy
from shoal.actors.ingress.errors import internal_error, timed_out
from shoal.actors.ingress.logprobs import ScoredToken
from shoal.actors.ingress.metrics import ChoiceMeter, ModelMetrics
from shoal.actors.ingress.protocol import Finish, Usage
from shoal.actors.ingress.transcript import TextDelta, Transcript
from shoal.actors.messages import CachedTokens, TokenChunk

KEEP_ALIVE_S = 15.0

Heard = tuple[int, TextDelta] | Exception | None
"""Something was said by the choice of this index; it failed; nothing was said for KEEP_ALIVE_S."""
Inbox = asyncio.Queue[Heard]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """In the event loop's time, which tests may replace."""

    arrived: float
    timeout_s: float

    @property
    def at(self) -> float:
        return self.arrived + self.timeout_s


async def text_deltas(
    dispatcher: Dispatcher,
    choices: Sequence[Transcript],
    deadline: Deadline,
    metrics: ModelMetrics,
    placed: Callable[[PlacedBy], None],
) -> AsyncGenerator[tuple[int, TextDelta] | None, None]:
    """Deltas of all the choices as they come, each with its choice's index; None after a while of silence.

    The last delta of a choice has the reason to finish; its request has left the dispatcher by then: a slow
    client must not keep an engine busy with an answer that a stop string has ended. Close the generator to
    abort what has not finished. If one choice fails so do the others: raises ApiError, also at the deadline.
    `placed` hears of each placement of any of them.
    """

    def has_begun() -> bool:
        return any(choice.was_heard for choice in choices)

    inbox: Inbox = asyncio.Queue()
    watch = _Watch(inbox, deadline)
    opened = [
        one
        for siblings in by_prompt(choices)
        for one in dispatcher.open(
            [choice.asked.request for choice in siblings], siblings[0].asked.block_keys, placed, has_begun
        )
    ]
    listeners = [
        asyncio.create_task(_listen(one, index, choice, ChoiceMeter(metrics, deadline.arrived), inbox))
        for index, (one, choice) in enumerate(zip(opened, choices, strict=True))
    ]
    unfinished = len(listeners)
    try:
        while unfinished:
            heard = await inbox.get()
            if isinstance(heard, Exception):
                raise heard
            if heard is not None:
                watch.heard()
                index, delta = heard
                if delta.finish_reason is not None:
                    unfinished -= 1
                    took_s = asyncio.get_running_loop().time() - deadline.arrived
                    metrics.count_finished(delta.finish_reason, choices[index].usage, took_s)
            yield heard
    finally:
        watch.cancel()
        for listener in listeners:
            listener.cancel()
        await asyncio.gather(*listeners, return_exceptions=True)
        metrics.count_tokens(total_usage([choice for choice in choices if choice.has_begun]))


class _Watch:
    """Speaks up in silence and at the deadline. One timer an answer: one a token would cost more than it."""

    def __init__(self, inbox: Inbox, deadline: Deadline) -> None:
        self._inbox = inbox
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._last_heard = self._loop.time()
        self._set()

    def heard(self) -> None:
        self._last_heard = self._loop.time()

    def cancel(self) -> None:
        self._timer.cancel()

    def _set(self) -> None:
        due = min(self._deadline.at, self._last_heard + KEEP_ALIVE_S)
        self._timer = self._loop.call_at(due, self._ring)

    def _ring(self) -> None:
        now = self._loop.time()
        if now >= self._deadline.at:
            self._inbox.put_nowait(timed_out(self._deadline.timeout_s))
            return
        if now >= self._last_heard + KEEP_ALIVE_S:
            self._inbox.put_nowait(None)
            self._last_heard = now
        self._set()


async def _listen(
    opened: AbstractAsyncContextManager[AsyncIterator[TokenChunk]],
    index: int,
    transcript: Transcript,
    meter: ChoiceMeter,
    inbox: Inbox,
) -> None:
    """Ends with a delta that has a finish_reason, or with an error."""
    now = asyncio.get_running_loop().time
    try:
        async with opened as chunks:
            async for chunk in chunks:
                meter.saw(len(chunk.token_ids), now())
                if transcript.has_begun and chunk.cached_tokens is not None:
                    meter.went_on(transcript.usage.total_tokens - chunk.cached_tokens.total)
                delta = transcript.feed(chunk)
                if delta.finish_reason is not None:
                    break
                inbox.put_nowait((index, delta))
            else:
                raise internal_error(detail="the token stream ended without a reason to finish")
    except Exception as error:
        inbox.put_nowait(error)
    else:
        inbox.put_nowait((index, delta))


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """All of one choice."""

    text: str
    tokens: tuple[ScoredToken, ...]
    finish_reason: Finish


async def whole_choices(
    deltas: AsyncGenerator[tuple[int, TextDelta] | None, None], num_choices: int
) -> list[Said]:
    texts: list[list[str]] = [[] for _ in range(num_choices)]
    tokens: list[list[ScoredToken]] = [[] for _ in range(num_choices)]
    finished: dict[int, Finish] = {}
    async with aclosing(deltas):
        async for item in deltas:
            if item is None:
                continue
            index, delta = item
            texts[index].append(delta.text)
            tokens[index] += delta.tokens
            if delta.finish_reason is not None:
                finished[index] = delta.finish_reason
    return [
        Said(text="".join(texts[i]), tokens=tuple(tokens[i]), finish_reason=finished[i])
        for i in range(num_choices)
    ]


def by_prompt(choices: Sequence[Transcript]) -> list[list[Transcript]]:
    """The choices of one prompt are neighbours."""
    return [
        list(siblings) for _, siblings in groupby(choices, key=lambda choice: choice.asked.request.prompt_id)
    ]


def shown_of(choices: Sequence[Transcript], num_shown: int) -> list[int]:
    """So many of each prompt's, by index; if there are more, those that are likeliest by token, in order."""
    shown: list[int] = []
    first = 0
    for siblings in by_prompt(choices):
        indices = list(range(first, first + len(siblings)))
        if len(siblings) > num_shown:
            indices.sort(key=lambda index: -choices[index].mean_logprob)
        shown += indices[:num_shown]
        first += len(siblings)
    return shown


def total_usage(choices: Sequence[Transcript]) -> Usage:
    """A prompt counts once, with what was cached of it for the first of its choices."""
    prompts = [siblings[0].usage for siblings in by_prompt(choices)]
    return Usage.of(
        sum(usage.prompt_tokens for usage in prompts),
        sum(choice.usage.completion_tokens for choice in choices),
        sum((usage.cached_tokens_by_place for usage in prompts), CachedTokens()),
    )
