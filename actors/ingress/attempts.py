"""One request on one engine after another, until its answer is complete."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from shoal.actors.ingress.dispatch import PlacedBy
from shoal.actors.ingress.home import Home
from shoal.actors.ingress.links import (
    CALL_DEADLINE_S,
    HUNG_AFTER_S,
    Inbox,
    Key,
    Link,
    error_chunk,
)
from shoal.actors.ingress.placer import Place
from shoal.actors.messages import EngineId, EngineRequest, ErrorKind, FinishReason, StoreId, TokenChunk
from shoal.kvstore.block_hash import BlockKey, complete_keys, root_key

MAX_LOSSES = 4
"""Engines that died under one request in a row, without a token from any: it may be what kills them."""

RESUME_DEADLINE_S = 60.0
"""How long an answer that has begun may be without an engine, or without one that has room."""

RETRY_S = 0.5
"""After so long engines that were full are asked again on behalf of an answer that has begun."""


Sent = tuple[Link, Inbox]
"""Where an attempt is, and where its chunks arrive."""


class Attempts:
    """What a request is told, by whichever engine serves it.

    The answer belongs to us: what was received of it goes along to the next engine, which computes it like a
    prompt and draws what follows. So the death of an engine is a pause: nothing is said twice, nothing lost.

    A request that nobody has said anything of yet is tried at once on each engine once, and if none takes it
    its client hears so: it may have other places to go. An answer that has begun has not, so it waits, with
    all its choices: a failure of one would end the others. It waits for nobody where nobody can come: its
    deployment is gone, and no other of the model computes the same bits.
    """

    def __init__(
        self,
        request: EngineRequest,
        block_keys: tuple[BlockKey, ...],
        *,
        homes: Callable[[], Sequence[Home]],
        placed: Callable[[PlacedBy], None],
        has_begun: Callable[[], bool],
        block_size: int,
        siblings: "Siblings | None" = None,
    ) -> None:
        """homes: where it can be computed to the same bits, that of its own deployment first. siblings: with
        whom its first attempt is sent."""
        self._request = request  # of the latest attempt
        self._block_keys = block_keys  # of its tokens
        self._homes = homes
        self._placed = placed
        self._answer_has_begun = has_begun
        self._block_size = block_size
        self._siblings = siblings
        self._link: Link | None = None  # where that attempt lives
        self._received: list[int] = []
        self._num_scored = 0
        self._saved_in: dict[StoreId, None] = {}
        """The stores of all engines that were lost under it."""
        self._tried: frozenset[EngineId] = frozenset()
        self._losses: frozenset[EngineId] = frozenset()
        self._lost_at: float | None = None
        """When the first of those was lost, or refused, of which nothing has been heard since."""

    async def chunks(self) -> AsyncIterator[TokenChunk]:
        failure = error_chunk(self._key, ErrorKind.NO_ENGINE, "no engine is ready")
        sent = await (self._send() if self._siblings is None else self._siblings.send(self))
        while sent is not None:
            link, inbox = sent
            while not _is_passed_on(chunk := await self._hear(inbox)):
                yield chunk
                if chunk.finish_reason is not None:
                    return
            failure = chunk
            self._lose(link, chunk)
            if (end := self._end_of_received()) is not None:
                yield end
                return
            sent = await self._send()
        yield failure

    def leave(self) -> None:
        """Nobody listens any more: what still lives is aborted."""
        if self._siblings is not None:
            self._siblings.leave(self)
        self._end(abort=True)

    @property
    def _key(self) -> Key:
        return self._request.request_id, self._request.attempt

    @property
    def _has_begun(self) -> bool:
        return bool(self._received or self._num_scored) or self._answer_has_begun()

    async def _send(self) -> Sent | None:
        place = await self._next_place()
        return None if place is None else (await _submit(place, [self]))[0]

    async def _next_place(self) -> Place | None:
        """None when no engine can take the request, or it has cost too many."""
        if len(self._losses) >= MAX_LOSSES:
            return None
        # First, since blind placements are counted by submits: nothing may come between the two.
        own = self._homes()[0]
        saved = await own.stores.find(self._saved_in, self._block_keys)
        while (place := await self._place()) is None:
            if not self._may_wait:
                return None
            await own.links.introduced(RETRY_S)
            self._tried = frozenset()
        self._placed(place.by)
        return replace(place, sources=(*saved, *place.sources))

    async def _place(self) -> Place | None:
        for home in self._homes():
            place = await home.placer.place(self._request, self._block_keys, self._tried)
            if place is not None:
                return place
        # What drains takes nothing new, but this is not: it would be lost.
        return self._homes()[0].placer.place_on_draining(self._tried) if self._has_begun else None

    @property
    def _may_wait(self) -> bool:
        """For an engine that comes, or has room again."""
        if not self._has_begun or self._lost_at is None or all(home.is_gone for home in self._homes()):
            return False
        return _now() < self._lost_at + RESUME_DEADLINE_S

    def _go_to(self, place: Place) -> EngineRequest:
        self._request = replace(self._request, sources=place.sources)
        self._link = place.link
        return self._request

    def _patience_s(self, place: Place) -> float:
        """The last that can take it is given more time: what drains is no other place for what is new."""
        tried = self._tried | {place.link.engine_id}
        has_others = any(home.placer.others(tried) for home in self._homes())
        return HUNG_AFTER_S if has_others else CALL_DEADLINE_S

    async def _hear(self, inbox: Inbox) -> TokenChunk:
        chunk = await inbox.get()
        if chunk.finish_reason is not None:
            self._end(abort=False)
        if chunk.token_ids or chunk.prompt_logprobs:
            self._received += chunk.token_ids
            self._num_scored += len(chunk.prompt_logprobs)
            self._tried, self._losses, self._lost_at = frozenset(), frozenset(), None
        return chunk

    def _lose(self, link: Link, failure: TokenChunk) -> None:
        """The next attempt goes on behind what was received."""
        self._tried |= {link.engine_id}
        if _kind(failure) is ErrorKind.ENGINE_LOST:
            if link.died:
                self._losses |= {link.engine_id}
            if link.store_id is not None:
                self._saved_in[link.store_id] = None
        self._lost_at = _now() if self._lost_at is None else self._lost_at
        self._request = replace(
            self._request,
            attempt=self._request.attempt + 1,
            output_token_ids=tuple(self._received),
            num_prompt_logprobs=self._num_scored,
        )
        fingerprint, request = self._homes()[0].placer.fingerprint, self._request
        if self._received and fingerprint:
            root = root_key(fingerprint, request.cache_salt)
            tokens = request.prompt_token_ids + request.output_token_ids
            self._block_keys = complete_keys(root, self._block_keys, tokens, self._block_size)

    def _end_of_received(self) -> TokenChunk | None:
        """Why the answer is complete, if only the word for it is lost."""
        if self._received and self._received[-1] in self._request.stop_token_ids:
            reason = FinishReason.STOP
        elif len(self._received) >= self._request.max_tokens:
            reason = FinishReason.LENGTH
        else:
            return None
        request_id, attempt = self._key
        return TokenChunk(request_id=request_id, attempt=attempt, finish_reason=reason)

    def _end(self, *, abort: bool) -> None:
        if self._link is not None:
            self._link.end(self._key, abort=abort)
            self._link = None


class Siblings:
    """One place and one call for the first attempts of the choices of one prompt: so an engine has them all
    at once, and computes the prompt once. From then on each goes its own way.

    Who has left by then is not sent, and when all have, nobody is. Who comes later is sent by itself.
    """

    def __init__(self) -> None:
        self._together: list[Attempts] = []
        self._sending: asyncio.Task[dict[Attempts, Sent]] | None = None

    async def send(self, one: Attempts) -> Sent | None:
        """None if no engine can take them."""
        self._together.append(one)
        if self._sending is None:  # begins when all who listen by now have come
            self._sending = asyncio.create_task(self._send())
        sent = await asyncio.shield(self._sending)
        return await one._send() if sent and one not in sent else sent.get(one)

    def leave(self, one: Attempts) -> None:
        if one in self._together:
            self._together.remove(one)
        if self._sending is not None and not self._together:
            self._sending.cancel()

    async def _send(self) -> dict[Attempts, Sent]:
        place = await self._together[0]._next_place()
        if place is None:
            return {}
        together = list(self._together)
        return dict(zip(together, await _submit(place, together), strict=True))


async def _submit(place: Place, together: Sequence[Attempts]) -> list[Sent]:
    patience_s = together[0]._patience_s(place)
    inboxes = await place.link.submit([one._go_to(place) for one in together], patience_s)
    return [(place.link, inbox) for inbox in inboxes]


def _now() -> float:
    return asyncio.get_running_loop().time()


def _kind(chunk: TokenChunk) -> ErrorKind | None:
    return None if chunk.error is None else chunk.error.kind


def _is_passed_on(chunk: TokenChunk) -> bool:
    """A failure of an engine of which the next one knows nothing."""
    return _kind(chunk) in (ErrorKind.OVERLOADED, ErrorKind.ENGINE_LOST)
