"""How an answer is written: whole as JSON, or as server-sent events.

The events of a stream differ only in their text, so the envelope is serialized once and each text is spliced
in: a token costs one small string, not a model. Events with logprobs are not worth that.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pydantic import BaseModel
from pydantic_core import to_json

from shoal.actors.ingress.events import event
from shoal.actors.ingress.generation import Said
from shoal.actors.ingress.logprobs import ScoredToken, chat_logprobs, completion_logprobs
from shoal.actors.ingress.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    Completion,
    CompletionChoice,
    Finish,
    Usage,
)
from shoal.actors.ingress.transcript import TextDelta

_SLOT = "\x00"


class Answer(ABC):
    """One request's answer in the shape of its endpoint, of one or several choices."""

    def __init__(
        self, answer_id: str, created: int, model: str, *, include_usage: bool, include_logprobs: bool
    ) -> None:
        self._id, self._created, self._model = answer_id, created, model
        self._without = None if include_usage else {"usage"}
        self._include_logprobs = include_logprobs
        self._envelopes: dict[int, tuple[bytes, bytes]] = {}
        """By choice: what stands before and behind its text."""

    @abstractmethod
    def whole(self, choices: Sequence[Said], usage: Usage) -> bytes: ...

    @abstractmethod
    def opening(self, index: int) -> bytes:
        """What a choice's stream begins with, if anything."""

    def delta(self, index: int, delta: TextDelta) -> bytes:
        """Nothing if there is nothing to tell."""
        if delta.tokens:
            return self._text_event(index, delta.text, delta.tokens)
        if not delta.text:
            return b""
        envelope = self._envelopes.get(index)
        if envelope is None:
            before, after = self._text_event(index, _SLOT).split(to_json(_SLOT))
            envelope = self._envelopes[index] = (before, after)
        return envelope[0] + to_json(delta.text) + envelope[1]

    @abstractmethod
    def finish(self, index: int, reason: Finish) -> bytes: ...

    @abstractmethod
    def usage(self, usage: Usage) -> bytes: ...

    @abstractmethod
    def _text_event(self, index: int, text: str, tokens: Sequence[ScoredToken] = ()) -> bytes: ...

    def _event(self, chunk: BaseModel) -> bytes:
        return event(chunk.model_dump_json(exclude=self._without).encode())


class ChatAnswer(Answer):
    def whole(self, choices: Sequence[Said], usage: Usage) -> bytes:
        answer = ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                ChatChoice(
                    index=index,
                    message=AssistantMessage(content=said.text),
                    logprobs=chat_logprobs(said.tokens) if self._include_logprobs else None,
                    finish_reason=said.finish_reason,
                )
                for index, said in enumerate(choices)
            ],
            usage=usage,
        )
        return answer.model_dump_json().encode()

    def opening(self, index: int) -> bytes:
        return self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))])

    def finish(self, index: int, reason: Finish) -> bytes:
        return self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=reason)])

    def usage(self, usage: Usage) -> bytes:
        return self._chunk([], usage)

    def _text_event(self, index: int, text: str, tokens: Sequence[ScoredToken] = ()) -> bytes:
        logprobs = chat_logprobs(tokens) if tokens else None
        return self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(content=text), logprobs=logprobs)])

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> bytes:
        return self._event(
            ChatCompletionChunk(
                id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
            )
        )


class CompletionAnswer(Answer):
    def whole(self, choices: Sequence[Said], usage: Usage) -> bytes:
        answer = self._completion(
            [
                CompletionChoice(
                    index=index,
                    text=said.text,
                    logprobs=completion_logprobs(said.tokens) if self._include_logprobs else None,
                    finish_reason=said.finish_reason,
                )
                for index, said in enumerate(choices)
            ],
            usage,
        )
        return answer.model_dump_json().encode()

    def opening(self, index: int) -> bytes:
        return b""

    def finish(self, index: int, reason: Finish) -> bytes:
        return self._event(self._completion([CompletionChoice(index=index, text="", finish_reason=reason)]))

    def usage(self, usage: Usage) -> bytes:
        return self._event(self._completion([], usage))

    def _text_event(self, index: int, text: str, tokens: Sequence[ScoredToken] = ()) -> bytes:
        logprobs = completion_logprobs(tokens) if tokens else None
        return self._event(self._completion([CompletionChoice(index=index, text=text, logprobs=logprobs)]))

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)
