"""How an answer is written: whole as JSON, or as server-sent events.

The events of a stream differ only in their text, so the envelope is serialized once and each text is spliced
in: a token costs one small string, not a model.
"""

from abc import ABC, abstractmethod

from pydantic import BaseModel
from pydantic_core import to_json

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

DONE = b"data: [DONE]\n\n"
_SLOT = "\x00"


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


class Answer(ABC):
    """One request's answer in the shape of its endpoint."""

    def __init__(self, answer_id: str, created: int, model: str, *, include_usage: bool) -> None:
        self._id, self._created, self._model = answer_id, created, model
        self._without = None if include_usage else {"usage"}
        self._before, self._after = self._text_event(_SLOT).split(to_json(_SLOT))

    @abstractmethod
    def whole(self, text: str, finish_reason: Finish, usage: Usage) -> bytes: ...

    @abstractmethod
    def opening(self) -> bytes:
        """What a stream begins with, if anything."""

    def text(self, text: str) -> bytes:
        return self._before + to_json(text) + self._after

    @abstractmethod
    def finish(self, reason: Finish) -> bytes: ...

    @abstractmethod
    def usage(self, usage: Usage) -> bytes: ...

    @abstractmethod
    def _text_event(self, text: str) -> bytes: ...

    def _event(self, chunk: BaseModel) -> bytes:
        return event(chunk.model_dump_json(exclude=self._without).encode())


class ChatAnswer(Answer):
    def whole(self, text: str, finish_reason: Finish, usage: Usage) -> bytes:
        choice = ChatChoice(message=AssistantMessage(content=text), finish_reason=finish_reason)
        answer = ChatCompletion(
            id=self._id, created=self._created, model=self._model, choices=[choice], usage=usage
        )
        return answer.model_dump_json().encode()

    def opening(self) -> bytes:
        return self._chunk([ChatChunkChoice(delta=ChatDelta(role="assistant", content=""))])

    def finish(self, reason: Finish) -> bytes:
        return self._chunk([ChatChunkChoice(delta=ChatDelta(), finish_reason=reason)])

    def usage(self, usage: Usage) -> bytes:
        return self._chunk([], usage)

    def _text_event(self, text: str) -> bytes:
        return self._chunk([ChatChunkChoice(delta=ChatDelta(content=text))])

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> bytes:
        return self._event(
            ChatCompletionChunk(
                id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
            )
        )


class CompletionAnswer(Answer):
    def whole(self, text: str, finish_reason: Finish, usage: Usage) -> bytes:
        choice = CompletionChoice(text=text, finish_reason=finish_reason)
        return self._completion([choice], usage).model_dump_json().encode()

    def opening(self) -> bytes:
        return b""

    def finish(self, reason: Finish) -> bytes:
        return self._event(self._completion([CompletionChoice(text="", finish_reason=reason)]))

    def usage(self, usage: Usage) -> bytes:
        return self._event(self._completion([], usage))

    def _text_event(self, text: str) -> bytes:
        return self._event(self._completion([CompletionChoice(text=text)]))

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)
