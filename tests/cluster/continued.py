"""What each continuation has cost, as the ingress that arranged it saw it."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, cast

import ray

from shoal.actors.ingress.attempts import Attempts
from shoal.actors.ingress.links import Key
from shoal.kvstore.block_hash import BlockKey
from tests.cluster.served import Served

SNAPSHOT_DEADLINE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Continuation:
    num_tokens: int
    """Of prompt and answer, that were there when the engine was lost."""
    num_saved: int
    """Of these, in the stores at that moment: whole blocks, from the first on without a gap. The last token
    is computed in any case, since its row draws the next one; so a block that it completes does not count."""
    block_size: int
    num_recomputed: int
    """Of these, by the next engine."""

    @property
    def num_unsaved(self) -> int:
        """Of those that whole blocks could have spared."""
        return (self.num_tokens - 1) // self.block_size * self.block_size - self.num_saved

    @property
    def num_too_many(self) -> int:
        """Recomputed beyond a block and what was not saved."""
        return max(0, self.num_recomputed - self.block_size - self.num_unsaved)


def watch(served: Served) -> None:
    """From now on its ingresses take down what goes on elsewhere."""
    _tell(served, _ingresses(served), _watch)


def let_engines_fetch_all(served: Served) -> None:
    """Those that are there now: a model as small as the tests' is else sooner computed than fetched."""
    _tell(served, served.engine_names(), _fetch_all)


def hold_saves(served: Served, name: str) -> None:
    """What this engine saves stays in its staging from now on."""
    _tell(served, [name], _hold_saves)


def continuations(served: Served) -> list[Continuation]:
    """Since it is watched; those alone of which a token was heard."""
    asked = [served.actor(name).__ray_call__.remote(_taken_down) for name in _ingresses(served)]
    return [continuation for taken in ray.get(asked, timeout=30) for continuation in taken]


def described(costs: Sequence[Continuation]) -> Iterator[str]:
    yield f"{len(costs)} continuations; of each, in tokens:"
    for what, counts in {
        "received": [cost.num_tokens for cost in costs],
        "in complete blocks that no store had": [cost.num_unsaved for cost in costs],
        "computed again": [cost.num_recomputed for cost in costs],
        "of these beyond a block and the former": [cost.num_too_many for cost in costs],
    }.items():
        mean = sum(counts) / max(1, len(counts))
        yield f"  {what}: {mean:.1f} on average, {max(counts, default=0)} at most"


def _ingresses(served: Served) -> list[str]:
    return sorted(name for name in served.names() if name.startswith("ingress-"))


def _tell(served: Served, names: Sequence[str], what: Callable[[Any], None]) -> None:
    ray.get([served.actor(name).__ray_call__.remote(what) for name in names], timeout=30)


def _fetch_all(actor: Any) -> None:
    actor._built.rates._tokens_per_s = lambda: 0.0


def _hold_saves(actor: Any) -> None:
    actor._offers.begin = lambda extents: None


def _taken_down(actor: Any) -> list[Continuation]:
    return list(actor.continuations)


def _watch(actor: Any) -> None:
    """In the ingress: the stores are looked at before anything else is done for a stream that was lost."""
    actor.continuations = taken_down = []
    (streams,), cls = actor._streams.values(), cast(Any, Attempts)
    next_place, hear = cls._next_place, cls._hear
    saved: dict[Key, int] = {}

    async def watched_next_place(attempts: Any) -> Any:
        if attempts._request.output_token_ids:
            keys = attempts._block_keys[: (attempts._request.num_tokens - 1) // attempts._block_size]
            saved[attempts._key] = await _num_leading(keys, streams._stores.actors.values())
        return await next_place(attempts)

    async def watched_hear(attempts: Any, inbox: Any) -> Any:
        key, request, chunk = attempts._key, attempts._request, await hear(attempts, inbox)
        if key in saved and chunk.cached_tokens is not None:
            taken_down.append(
                Continuation(
                    num_tokens=request.num_tokens,
                    num_saved=saved.pop(key) * attempts._block_size,
                    block_size=attempts._block_size,
                    num_recomputed=request.num_tokens - chunk.cached_tokens.total,
                )
            )
        return chunk

    cls._next_place, cls._hear = watched_next_place, watched_hear


async def _num_leading(keys: Sequence[BlockKey], stores: Any) -> int:
    """How many of the first of these blocks the stores that live have."""
    asked = [asyncio.wait_for(_keys_of(store), SNAPSHOT_DEADLINE_S) for store in stores]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    held = frozenset[BlockKey]().union(*(answer for answer in answers if isinstance(answer, frozenset)))
    return sum(1 for _ in takewhile(held.__contains__, keys))


async def _keys_of(store: Any) -> frozenset[BlockKey]:
    return frozenset((await store.snapshot.remote()).block_keys)
