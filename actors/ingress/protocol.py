"""The wire: OpenAI's completions and models with vLLM's additions, as far as they are served.

Types are strict: `true` is no number and `"5"` no integer. A field that is `null` counts as not sent.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from shoal.actors.messages import CachedTokens

Finish = Literal["stop", "length"]
Prompt = str | tuple[int, ...]
"""A text, or the token ids themselves."""

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_SALT_CHARS = 256
MAX_NAMED_TOKENS = 1024
"""Of logit_bias and of stop_token_ids: they travel with each prompt of a request."""
MAX_LOGPROBS = 20
"""Of either endpoint: OpenAI stops at 5 for completions, vLLM at 20 for both."""
MAX_ANSWERS = 256
"""Of one request, to all of its prompts; each of them is a request to an engine."""
MAX_CHOICES = 128
"""To one prompt, as OpenAI has it."""
DEFAULT_COMPLETION_TOKENS = 16

Int64 = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
Count = Annotated[int, Field(ge=0, le=INT64_MAX)]
AtLeastOne = Annotated[int, Field(ge=1, le=INT64_MAX)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
NumChoices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _false_is_none(value: Any) -> Any:
    return None if value is False else value


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


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """All four forms as a list of prompts. By hand: pydantic would try each form on each of 100,000 ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise PydanticCustomError("prompt", "A prompt is a text, a list of token ids, or a list of such")
    kinds = set(map(type, value))
    if kinds == {int}:
        return (tuple(value),)
    if len(value) > MAX_ANSWERS:
        raise PydanticCustomError("prompt", f"At most {MAX_ANSWERS} prompts may be sent at once")
    if kinds == {str}:
        return tuple(value)
    if kinds == {list} and all(set(map(type, token_ids)) == {int} for token_ids in value):
        return tuple(map(tuple, value))
    raise PydanticCustomError(
        "prompt",
        "A list must hold either token ids, or texts, or lists of token ids; none may be empty",
    )


class ApiRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(ApiRequest):
    include_usage: bool | None = None


class ModelRequest(ApiRequest):
    model: str | None = None


class GenerationRequest(ModelRequest):
    """What both kinds of completion may ask for. Where it does not say, the checkpoint's defaults hold."""

    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT64_MAX)] | None = None
    """0 and -1 keep every token."""
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    n: NumChoices | None = None
    """Answers to each prompt, each with a seed of its own that the request's determines."""
    seed: Int64 | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]],
            Field(max_length=MAX_NAMED_TOKENS),
        ]
        | None
    ) = None
    """Token id, in decimal, to what is added to its logit."""
    stop: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
            Field(max_length=MAX_STOP_STRINGS),
            BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_NAMED_TOKENS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    max_tokens: AtLeastOne | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    priority: Int64 | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds from the arrival of the request to the end of its answer."""

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def bounds_its_answer(self) -> bool:
        """Whether its answer has a length that is less than what there is room for."""
        return True


class ChatMessage(ApiRequest):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_joined_text, json_schema_input_type=str | list[dict[str, Any]])]
    name: str | None = None


Messages = Annotated[list[ChatMessage], Field(min_length=1)]


class ChatCompletionRequest(GenerationRequest):
    messages: Messages
    max_completion_tokens: AtLeastOne | None = None
    """The newer name of max_tokens, which it overrules."""
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    @property
    def bounds_its_answer(self) -> bool:
        return self.max_tokens is not None or self.max_completion_tokens is not None


class CompletionRequest(GenerationRequest):
    prompt: Annotated[
        tuple[Prompt, ...],
        PlainValidator(_prompts, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
    ]
    max_tokens: Count | None = None
    """0 only together with echo: the prompt is scored and nothing is said."""
    echo: bool | None = None
    best_of: NumChoices | None = None
    """Candidates of each prompt, of which the n likeliest are shown: by the mean logprob of their tokens."""
    logprobs: Annotated[NumLogprobs | None, BeforeValidator(_false_is_none)] = None


class TokenizeRequest(ModelRequest):
    """Either a prompt or messages."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """To a prompt, unless false. The template of messages writes them itself."""
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ModelRequest):
    tokens: list[int]


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    prompt: str


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    cached_tokens_by_place: CachedTokens
    """Ours: the same cached tokens by where they were found."""

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, cached: CachedTokens) -> "Usage":
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached.total),
            cached_tokens_by_place=cached,
        )


class LikelyToken(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    """Columns, a row for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
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
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None


class ChatCompletionChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
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
