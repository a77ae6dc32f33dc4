"""Traces of real traffic, in Mooncake's format, and what could be hit of one at best."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from shoal.kvstore.block_hash import KEY_BYTES, BlockKey


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    arrives_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_keys: tuple[BlockKey, ...]
    """Of the prompt's complete blocks."""

    def num_skippable(self, block_size: int) -> int:
        """Blocks that need not be computed if somebody has them: the last token always is."""
        return min(len(self.block_keys), (self.num_prompt_tokens - 1) // block_size)


def read_trace(path: Path, block_size: int) -> list[TracedRequest]:
    """A line is one request, in order of arrival:

        {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one a block]}

    An id names a block and all before it. Raises ValueError, naming the line, for anything else.
    """
    keys: dict[int, BlockKey] = {}
    requests: list[TracedRequest] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            requests.append(_read(json.loads(line), block_size, keys))
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {_reason(error)}") from error
    if not requests:
        raise ValueError(f"{path} has no requests")
    return sorted(requests, key=lambda request: request.arrives_s)


def at_rate(requests: Iterable[TracedRequest], factor: float) -> list[TracedRequest]:
    """The same requests, arriving `factor` times as fast."""
    return [replace(request, arrives_s=request.arrives_s / factor) for request in requests]


def one_cache_hit_tokens(requests: Iterable[TracedRequest], block_size: int) -> int:
    """What one cache that forgets nothing would hit, if it had everything as soon as it was asked for."""
    seen: set[BlockKey] = set()
    num_blocks = 0
    for request in requests:
        skippable = request.block_keys[: request.num_skippable(block_size)]
        num_blocks += sum(1 for _ in takewhile(seen.__contains__, skippable))
        seen.update(request.block_keys)
    return num_blocks * block_size


def num_distinct_blocks(requests: Sequence[TracedRequest]) -> int:
    return len({key for request in requests for key in request.block_keys})


def _read(fields: dict[str, Any], block_size: int, keys: dict[int, BlockKey]) -> TracedRequest:
    num_prompt, num_output = int(fields["input_length"]), int(fields["output_length"])
    if num_prompt < 1 or num_output < 0 or fields["timestamp"] < 0:
        raise ValueError("a length or a time that cannot be")
    hash_ids, complete = fields["hash_ids"], num_prompt // block_size
    if len(hash_ids) < complete:
        raise ValueError(f"{len(hash_ids)} hash_ids for {complete} complete blocks of {block_size} tokens")
    return TracedRequest(
        arrives_s=fields["timestamp"] / 1e3,
        num_prompt_tokens=num_prompt,
        num_output_tokens=max(1, num_output),
        block_keys=tuple(
            keys.setdefault(i, BlockKey(i.to_bytes(KEY_BYTES, "little"))) for i in hash_ids[:complete]
        ),
    )


def _reason(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
