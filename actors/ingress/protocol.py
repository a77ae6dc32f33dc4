"""The wire: OpenAI's chat completions, completions and models, as far as they are served.

Types are strict: `true` is no number and `"5"` no integer. A field that is `null` counts as not sent.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

Finish = Literal["stop", "length"]

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_STOP_STRINGS = 4
DEFAULT_COMPLETION_TOKENS = 16


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _part_text(part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise PydanticCustomError("content_part", "A content part must be an object with a type")
    if part["type"] != "text":
        raise PydanticCustomError("content_part", "Only content parts of type 'text' are supported")
    if not isinstance(part.get("text"), str):
        raise PydanticCustomError("content_part", "A text part must have a string 'text'")
    return str(part["text"])


def _joined_text(content: Any) -> Any:
    """Templates read a string: text parts become its lines."""
    return "\n".join(map(_part_text, content)) if isinstance(content, list) else content


def _single_prompt(prompt: Any) -> Any:
    if isinstance(prompt, list):
        raise PydanticCustomError("prompt_list", "Lists of prompts or of token ids are not supported")
    return prompt


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(_Request):
    include_usage: bool | None = None


class GenerationRequest(_Request):
    """What both kinds of completion may ask for."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT64_MAX)] | None = None
    """0 and -1 keep every token."""
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    stop: (
        Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(max_length=MAX_STOP_STRINGS),
            BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
        ]
        | None
    ) = None
    max_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatMessage(_Request):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_joined_text, json_schema_input_type=str | list[dict[str, Any]])]
    name: str | None = None


class ChatCompletionRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    """The newer name of max_tokens, which it overrules."""


class CompletionRequest(GenerationRequest):
    prompt: Annotated[str, BeforeValidator(_single_prompt, json_schema_input_type=str)]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int) -> "Usage":
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        )


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int = 0
    message: AssistantMessage
    logprobs: None = None
    finish_reason: Finish


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(TypedDict, total=False):
    """Absent and null differ here: clients add up what is present."""

    role: Literal["assistant"]
    content: str


class ChatChunkChoice(BaseModel):
    index: int = 0
    delta: ChatDelta
    logprobs: None = None
    finish_reason: Finish | None = None


class ChatCompletionChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionChoice(BaseModel):
    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: Finish | None = None


class Completion(BaseModel):
    """A whole completion and each of its streamed chunks have the same shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["shoal"] = "shoal"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]
