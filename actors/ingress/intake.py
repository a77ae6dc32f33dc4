"""From a body to what the engines are asked.

Plain functions of the body, and slow ones where a prompt is long: the endpoints run them on threads.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from shoal.actors.ingress.choices import Asked, choices_of, is_to_be_ranked, num_candidates
from shoal.actors.ingress.errors import (
    bad_request,
    context_length_exceeded,
    prompt_too_long,
    unknown_token,
)
from shoal.actors.ingress.generation_config import GenerationDefaults
from shoal.actors.ingress.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    GenerationRequest,
    Prompt,
    TokenizeRequest,
    TokenizeResponse,
)
from shoal.actors.ingress.stop_strings import StopString
from shoal.actors.ingress.text import TextCodec
from shoal.actors.messages import EngineRequest, ModelCard, RequestId, SamplingParams
from shoal.kvstore.block_hash import BlockKey, extend_keys, root_key

MAX_TOP_K = 2**31 - 1
"""More than any vocabulary has, so a larger one means the same."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """What is the same for all the prompts of a body, and costs time to make."""

    cache_salt: str
    sampling: SamplingParams
    """But for the seed."""
    stop_token_ids: frozenset[int]
    stop: tuple[StopString, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What one body asks for as a whole."""

    answer_id: str
    choices: tuple[Asked, ...]
    """Those of one prompt are neighbours."""
    num_shown: int = 1
    """Of each prompt's: the likeliest, if there are more."""
    shows_logprobs: bool = False


class Intake:
    def __init__(self, model: ModelCard, codec: TextCodec, defaults: GenerationDefaults) -> None:
        self._card = model
        self._codec = codec
        self._defaults = defaults

    def learn_fingerprint(self, fingerprint: bytes) -> None:
        """Engines know it, and the front door may open before them."""
        self._card = replace(self._card, fingerprint=fingerprint)

    def chat(self, body: ChatCompletionRequest, salt: str) -> Intent:
        """`salt` is that of block keys: the tenant's and the client's own in one."""
        if body.top_logprobs and not body.logprobs:
            raise bad_request("top_logprobs: it needs logprobs to be true.", param="top_logprobs")
        prompt = self._encode_chat(body.messages)
        answer_id = f"chatcmpl-{secrets.token_hex(16)}"
        asked = self._asked(
            body,
            self._shared(body, salt),
            answer_id,
            prompt,
            max_tokens=output_budget(
                len(prompt),
                wanted=body.max_completion_tokens or body.max_tokens,
                default=None,
                max_model_len=self._card.max_model_len,
                param="messages",
            ),
            logprobs=body.top_logprobs or 0 if body.logprobs else None,
        )
        n = body.n or 1
        return Intent(
            answer_id=answer_id,
            choices=choices_of(asked, n),
            num_shown=n,
            shows_logprobs=bool(body.logprobs),
        )

    def completion(self, body: CompletionRequest, salt: str) -> Intent:
        """`salt` as for a chat."""
        if body.max_tokens == 0 and not body.echo:
            raise bad_request("max_tokens: 0 needs echo to be true.", param="max_tokens")
        num_choices = num_candidates(body)
        answer_id = f"cmpl-{secrets.token_hex(16)}"
        is_only_one = len(body.prompt) == 1
        shared = self._shared(body, salt)
        asked = (
            self._completion(body, shared, answer_id if is_only_one else f"{answer_id}-{index}", prompt)
            for index, prompt in enumerate(body.prompt)
        )
        return Intent(
            answer_id=answer_id,
            choices=tuple(choice for one in asked for choice in choices_of(one, num_choices)),
            num_shown=body.n or 1,
            shows_logprobs=body.logprobs is not None,
        )

    def tokenize(self, body: TokenizeRequest) -> TokenizeResponse:
        tokens = self._tokens(body)
        return TokenizeResponse(
            count=len(tokens),
            max_model_len=self._card.max_model_len,
            tokens=list(tokens),
            token_strs=self._codec.token_strings(tokens) if body.return_token_strs else None,
        )

    def _tokens(self, body: TokenizeRequest) -> tuple[int, ...]:
        match body.prompt, body.messages:
            case str(prompt), None if body.add_special_tokens is False:
                self._check_length(prompt, param="prompt")
                return self._codec.encode_plainly(prompt, add_special_tokens=False)
            case str(prompt), None:
                return self._encode_prompt(prompt)
            case None, list(messages):
                opens = body.add_generation_prompt is not False
                return self._encode_chat(messages, add_generation_prompt=opens)
        raise bad_request("Either prompt or messages must be given.", param="prompt")

    def _encode_prompt(self, prompt: str) -> tuple[int, ...]:
        self._check_length(prompt, param="prompt")
        return self._codec.encode_prompt(prompt)

    def _encode_chat(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        rendered = self._codec.render_chat(messages, add_generation_prompt=add_generation_prompt)
        self._check_length(rendered, param="messages")
        return self._codec.encode_chat(rendered)

    def _check_length(self, text: str, *, param: str) -> None:
        """A text that cannot fit is not tokenized."""
        fewest = self._codec.fewest_tokens(text)
        if fewest > self._card.max_model_len:
            raise prompt_too_long(len(text.encode()), fewest, self._card.max_model_len, param=param)

    def detokenize(self, body: DetokenizeRequest) -> DetokenizeResponse:
        self._check_ids(body.tokens, param="tokens")
        return DetokenizeResponse(prompt=self._codec.decode(body.tokens))

    def _completion(self, body: CompletionRequest, shared: _Shared, request_id: str, prompt: Prompt) -> Asked:
        if isinstance(prompt, str):
            token_ids = self._encode_prompt(prompt)
        else:
            self._check_ids(prompt, param="prompt")
            token_ids = prompt
        max_tokens = output_budget(
            len(token_ids),
            wanted=None if body.max_tokens is None else max(1, body.max_tokens),
            default=DEFAULT_COMPLETION_TOKENS,
            max_model_len=self._card.max_model_len,
            param="prompt",
        )
        return self._asked(
            body,
            shared,
            request_id,
            token_ids,
            max_tokens=max_tokens,
            logprobs=0 if is_to_be_ranked(body) and body.logprobs is None else body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
            echo=self._echo(prompt) if body.echo else None,
            is_silent=body.max_tokens == 0,
        )

    def _echo(self, prompt: Prompt) -> str:
        return prompt if isinstance(prompt, str) else self._codec.decode(prompt, goes_on=True)

    def _asked(
        self,
        body: GenerationRequest,
        shared: _Shared,
        request_id: str,
        prompt: tuple[int, ...],
        *,
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        echo: str | None = None,
        is_silent: bool = False,
    ) -> Asked:
        if body.min_tokens is not None and body.min_tokens > max_tokens:
            raise bad_request(
                f"min_tokens: {body.min_tokens} is more than the {max_tokens} tokens of the longest answer.",
                param="min_tokens",
            )
        request = EngineRequest(
            request_id=RequestId(request_id),
            attempt=1,
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            stop_token_ids=shared.stop_token_ids,
            # The seed is chosen here and once, so that an engine that takes over draws the same tokens.
            sampling=replace(shared.sampling, seed=_or(body.seed, secrets.randbits(63))),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            cache_salt=shared.cache_salt,
            priority=body.priority or 0,
        )
        # A prompt whose logprobs are wanted is computed in full, wherever it is.
        keys = prefix_keys(self._card, request.cache_salt, prompt) if prompt_logprobs is None else ()
        return Asked(request=request, block_keys=keys, stop=shared.stop, echo=echo, is_silent=is_silent)

    def _shared(self, body: GenerationRequest, cache_salt: str) -> _Shared:
        stop_token_ids = self._stop_token_ids(body)
        if body.min_tokens and len(stop_token_ids) >= self._codec.num_token_ids:
            raise bad_request(
                "min_tokens: an answer cannot go on where every token ends it.", param="min_tokens"
            )
        return _Shared(
            cache_salt=cache_salt,
            sampling=self._sampling(body),
            stop_token_ids=stop_token_ids,
            stop=tuple(map(StopString, body.stop or ())),
        )

    def _stop_token_ids(self, body: GenerationRequest) -> frozenset[int]:
        own = body.stop_token_ids or []
        self._check_ids(own, param="stop_token_ids")
        return frozenset(own) if body.ignore_eos else self._codec.stop_token_ids | frozenset(own)

    def _sampling(self, body: GenerationRequest) -> SamplingParams:
        default = self._defaults
        return SamplingParams(
            temperature=_or(body.temperature, default.temperature),
            top_k=min(max(0, _or(body.top_k, default.top_k)), MAX_TOP_K),
            top_p=_or(body.top_p, default.top_p),
            min_p=_or(body.min_p, default.min_p),
            presence_penalty=_or(body.presence_penalty, 0.0),
            frequency_penalty=_or(body.frequency_penalty, 0.0),
            repetition_penalty=_or(body.repetition_penalty, default.repetition_penalty),
            logit_bias=self._logit_bias(body),
            min_tokens=body.min_tokens or 0,
        )

    def _logit_bias(self, body: GenerationRequest) -> tuple[tuple[int, float], ...]:
        bias: dict[int, float] = {}
        for name, value in (body.logit_bias or {}).items():
            if not (name.isascii() and name.isdecimal() and len(name) <= 10):
                raise bad_request(f"logit_bias: {name[:32]!r} is not a token id.", param="logit_bias")
            if int(name) in bias:
                raise bad_request(f"logit_bias: {int(name)} is there twice.", param="logit_bias")
            bias[int(name)] = value
        self._check_ids(list(bias), param="logit_bias")
        return tuple(bias.items())

    def _check_ids(self, token_ids: Sequence[int], *, param: str) -> None:
        for extreme in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= extreme < self._codec.num_token_ids:
                raise unknown_token(extreme, self._codec.num_token_ids, param=param)


def prefix_keys(model: ModelCard, salt: str, token_ids: Sequence[int]) -> tuple[BlockKey, ...]:
    """Names of the prompt's complete blocks; none where it is unknown what their bytes depend on."""
    if not model.fingerprint:
        return ()
    return tuple(extend_keys(root_key(model.fingerprint, salt), token_ids, model.block_size))


def output_budget(
    num_prompt_tokens: int, *, wanted: int | None, default: int | None, max_model_len: int, param: str
) -> int:
    """How many tokens the answer may have. Only a length that nobody asked for is shortened to fit."""
    room = max_model_len - num_prompt_tokens
    if room < 1 or (wanted is not None and wanted > room):
        raise context_length_exceeded(num_prompt_tokens, wanted, max_model_len, param=param)
    if wanted is not None:
        return wanted
    return room if default is None else min(default, room)


def _or(sent: _T | None, default: _T) -> _T:
    return default if sent is None else sent
