"""What has been said of one choice: its tokens, counted and scored, and passed on as text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.actors.ingress.choices import Asked
from shoal.actors.ingress.detokenizer import Detokenizer, TokenBytes
from shoal.actors.ingress.errors import engine_error
from shoal.actors.ingress.logprobs import ScoredToken, scored
from shoal.actors.ingress.protocol import Finish, Usage
from shoal.actors.ingress.stop_strings import StopStrings
from shoal.actors.messages import (
    CachedTokens,
    ErrorKind,
    FinishReason,
    RequestError,
    TokenChunk,
    TokenLogprob,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    text: str
    """Often empty: half a character, or the possible beginning of a stop string."""
    tokens: tuple[ScoredToken, ...] = ()
    """If logprobs were asked for, each token of the text, also of text that is held back."""
    finish_reason: Finish | None = None


class Transcript:
    """Ends with the token that completes a stop string: what the engine says after that is neither shown, nor
    scored, nor counted."""

    def __init__(self, asked: Asked, table: TokenBytes) -> None:
        self.asked = asked
        self._table = table
        self._detokenizer = Detokenizer(table, asked.request.prompt_token_ids)
        self._stops = StopStrings(asked.stop)
        self._prompt = None if asked.echo is None else _EchoedPrompt(asked, asked.echo, table)
        self._num_chars = len(asked.echo or "")
        self._num_tokens = 0
        self._logprob = 0.0
        self._cached_tokens: CachedTokens | None = None
        self.has_begun = False
        """An engine has drawn a token: its prompt is computed, or was cached."""
        self.was_heard = False
        """An engine has said something of it, be it only of its prompt."""

    @property
    def usage(self) -> Usage:
        cached_tokens = self._cached_tokens or CachedTokens()
        return Usage.of(len(self.asked.request.prompt_token_ids), self._num_tokens, cached_tokens)

    @property
    def mean_logprob(self) -> float:
        """Of the tokens that were counted, if logprobs were asked for."""
        return self._logprob / max(1, self._num_tokens)

    def feed(self, chunk: TokenChunk) -> TextDelta:
        """Raises ApiError if the engine failed."""
        self.has_begun |= bool(chunk.token_ids)
        self.was_heard |= bool(chunk.token_ids or chunk.prompt_logprobs)
        self._cached_tokens = self._cached_tokens or chunk.cached_tokens  # the first attempt's
        texts: list[str] = []
        tokens: list[ScoredToken] = []
        if self._prompt is not None:
            texts.append(self._prompt.take_text())
            tokens += self._prompt.score(chunk.prompt_logprobs)
        if not self.asked.is_silent:
            self._say(chunk, texts, tokens)
        finish_reason = self._finish_reason(chunk)
        if finish_reason is not None:
            texts.append(self._stops.flush())
        return TextDelta(text="".join(texts), tokens=tuple(tokens), finish_reason=finish_reason)

    def _say(self, chunk: TokenChunk, texts: list[str], tokens: list[ScoredToken]) -> None:
        stop_token_at = len(chunk.token_ids) - 1 if chunk.finish_reason is FinishReason.STOP else None
        for index, token_id in enumerate(chunk.token_ids):
            self._num_tokens += 1
            if self.asked.request.logprobs is not None:
                tokens.append(scored(self._table, token_id, self._num_chars, chunk.logprobs[index]))
                self._logprob += chunk.logprobs[index].logprob
            if index == stop_token_at:
                break
            text = self._detokenizer.push(token_id)
            self._num_chars += len(text)
            # As long as the answer is too short to end, nothing in it is a stop string.
            is_too_short = self._num_tokens <= self.asked.request.sampling.min_tokens
            texts.append(text if is_too_short else self._stops.push(text))
            if self._stops.found:
                break

    def _finish_reason(self, chunk: TokenChunk) -> Finish | None:
        if self._stops.found:
            return "stop"
        match chunk.finish_reason:
            case None:
                return None
            case FinishReason.ERROR | FinishReason.ABORT:
                raise engine_error(chunk.error or _UNASKED_ABORT)
            case FinishReason.STOP if not self.asked.is_silent:
                return "stop"
            case _:
                return "length"


_UNASKED_ABORT = RequestError(kind=ErrorKind.ENGINE_LOST, message="the engine aborted the request by itself")


class _EchoedPrompt:
    """A prompt that is shown before its answer: its text at once, its logprobs as they are computed."""

    def __init__(self, asked: Asked, text: str, table: TokenBytes) -> None:
        self._token_ids = asked.request.prompt_token_ids
        self._is_scored = asked.request.prompt_logprobs is not None
        self._text = text
        self._table = table
        self._detokenizer = Detokenizer(table, ())
        self._num_taken = 0
        self._num_scored = 0
        self._num_chars = 0

    def take_text(self) -> str:
        """The text, once."""
        taken, self._num_taken = self._num_taken, len(self._text)
        return self._text[taken:]

    def score(self, logprobs: Sequence[TokenLogprob]) -> list[ScoredToken]:
        """The next tokens of the prompt; before the second the first, which has no logprob."""
        if not self._is_scored:
            return []
        pending: Iterable[TokenLogprob | None] = logprobs if self._num_scored else (None, *logprobs)
        return [self._next(logprob) for logprob in pending]

    def _next(self, logprob: TokenLogprob | None) -> ScoredToken:
        token_id = self._token_ids[self._num_scored]
        token = scored(self._table, token_id, self._num_chars, logprob)
        self._num_scored += 1
        self._num_chars += self._width(token_id, token.written)
        return token

    def _width(self, token_id: int, written: bytes) -> int:
        """Special tokens are part of the text if it was written with them, unlike a BOS that was added."""
        if self._table.is_visible(token_id):
            return len(self._detokenizer.push(token_id))
        text = written.decode()
        return len(text) if self._text.startswith(text, self._num_chars) else 0
