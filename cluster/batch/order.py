"""In which order lines are best asked: those that share a prefix together, and ahead of them who computes it.

An engine computes once what arrives together: a request whose prefix is being computed waits for it, and
holds up those that stand behind it. Asked one group after the other, a step of an engine would so begin one
group at most. Therefore the first of a group is asked before the groups ahead of it have ended.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar
from zlib import crc32

from pydantic_core import to_json

from shoal.cluster.batch.lines import Question

PIECE_CHARS = 64
"""Some 16 tokens: no block of a prefix cache is smaller."""
LEAST_PIECES = 2
"""What is worth to go ahead for."""
MOST_AHEAD, MOST_PIECES_AHEAD = 16, 512
"""Leaders, and pieces of their prompts: some 8,192 tokens, a large step, and little of a device's memory."""
MOST_WAITING = 1024
"""Lines that were passed over, and are in memory meanwhile."""
_PIECE_BYTES = array("I").itemsize

_T = TypeVar("_T")


def prefix_path(question: Question) -> bytes:
    """Where a request stands among those that share prefixes: sorted by it, they are neighbours.

    Four bytes for each PIECE_CHARS of the prompt, so it is a path in a trie of pieces: requests that begin
    alike have equal beginnings of their paths. Two different pieces may have the same four bytes; then two
    requests are neighbours for nothing.
    """
    body = question.body
    # What may not share is apart; what a body says beside the prompt changes no prefix.
    root = crc32(to_json([question.url, body.get("model"), body.get("cache_salt")]))
    prompt = to_json(_prompt(body))
    pieces = (crc32(prompt[i : i + PIECE_CHARS]) for i in range(0, len(prompt), PIECE_CHARS))
    return array("I", [root, *pieces]).tobytes()


def _prompt(body: dict[str, Any]) -> Any:
    """Of several prompts the first. A message is its role and content, however its fields are ordered."""
    messages, prompt = body.get("messages"), body.get("prompt")
    if isinstance(messages, list):
        return [[m.get("role"), m.get("content")] if isinstance(m, dict) else m for m in messages]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return prompt[0]
    return prompt


def leaders_first(lines: Iterable[tuple[bytes, _T]]) -> Iterator[_T]:
    """Lines that are sorted by their paths. Leaders are some groups ahead of those that follow them."""
    num_leaders = pieces_led = 0
    waiting: deque[tuple[int, int, _T]] = deque()
    for num_pieces, leads, line in _leading(lines):
        if leads:
            yield line
            num_leaders, pieces_led = num_leaders + 1, pieces_led + num_pieces
        else:
            waiting.append((num_leaders, pieces_led, line))
        while waiting and (
            num_leaders - waiting[0][0] >= MOST_AHEAD
            or pieces_led - waiting[0][1] >= MOST_PIECES_AHEAD
            or len(waiting) > MOST_WAITING
        ):
            yield waiting.popleft()[2]
    for _, _, line in waiting:
        yield line


def _leading(lines: Iterable[tuple[bytes, _T]]) -> Iterator[tuple[int, bool, _T]]:
    """(pieces, whether it leads, line). Who shares more with the one behind than with the one before is the
    first to compute what they share."""
    here: tuple[bytes, _T] | None = None
    shared_before = 0
    for there in lines:
        if here is not None:
            shared = _num_shared(here[0], there[0])
            yield len(here[0]) // _PIECE_BYTES, shared >= shared_before + LEAST_PIECES, here[1]
            shared_before = shared
        here = there
    if here is not None:
        yield len(here[0]) // _PIECE_BYTES, False, here[1]


def _num_shared(a: bytes, b: bytes) -> int:
    pieces = enumerate(zip(memoryview(a).cast("I"), memoryview(b).cast("I"), strict=False))
    return next((i for i, (x, y) in pieces if x != y), min(len(a), len(b)) // _PIECE_BYTES)
