"""Tokens with their logprobs, in the shapes that the two endpoints give them."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.actors.ingress.detokenizer import TokenBytes
from shoal.actors.ingress.protocol import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, LikelyToken
from shoal.actors.messages import TokenLogprob

LOWEST = -9999.0
"""In the place of minus infinity, which JSON does not have."""

Likely = tuple[bytes, float]
"""A token as it is written, and its logprob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    written: bytes
    offset: int
    """Characters of the choice's text before it; a part of a character stands where the character does."""
    logprob: float | None
    """None for the first token of a prompt, which nothing predicts."""
    top: tuple[Likely, ...]


def scored(table: TokenBytes, token_id: int, offset: int, logprob: TokenLogprob | None) -> ScoredToken:
    written = table.written(token_id)
    if logprob is None:
        return ScoredToken(written=written, offset=offset, logprob=None, top=())
    top = tuple((table.written(one), max(value, LOWEST)) for one, value in logprob.top)
    return ScoredToken(written=written, offset=offset, logprob=max(logprob.logprob, LOWEST), top=top)


def chat_logprobs(tokens: Sequence[ScoredToken]) -> ChatLogprobs:
    content = [
        ChatTokenLogprob(
            **_likely(token.written, token.logprob), top_logprobs=[_likely(*t) for t in token.top]
        )
        for token in tokens
        if token.logprob is not None
    ]
    return ChatLogprobs(content=content, refusal=None)


def completion_logprobs(tokens: Sequence[ScoredToken]) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[_text(token.written) for token in tokens],
        token_logprobs=[token.logprob for token in tokens],
        top_logprobs=[_row(token) for token in tokens],
        text_offset=[token.offset for token in tokens],
    )


def _row(token: ScoredToken) -> dict[str, float] | None:
    """The likeliest, and the token itself if it is none of them."""
    if token.logprob is None:
        return None
    return {_text(written): value for written, value in (*token.top, (token.written, token.logprob))}


def _likely(written: bytes, logprob: float) -> LikelyToken:
    return LikelyToken(token=_text(written), logprob=logprob, bytes=list(written))


def _text(written: bytes) -> str:
    """Parts of characters have no text; as OpenAI writes them, two of them never look the same."""
    try:
        return written.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)
