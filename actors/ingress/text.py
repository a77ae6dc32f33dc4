"""Between people's text and the model's tokens: chat template, tokenizer, end-of-sequence tokens.

The tokenizer is read through `PreTrainedTokenizerFast`, not `AutoTokenizer`: it takes tokenizer.json as it
is, and importing it does not import torch, which would cost the front door three seconds and 200 MB.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from shoal.actors.ingress.detokenizer import Detokenizer, TokenBytes
from shoal.actors.ingress.protocol import ChatMessage

_T = TypeVar("_T")


class PromptError(ValueError):
    """This text cannot become a prompt of this model; the message is for the client."""


class TextCodec:
    """A checkpoint's tokenizer. Encoding runs on threads, for a long prompt takes seconds."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, *, stop_token_ids: frozenset[int], num_threads: int = 2
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # What tokenizer.json says of these was meant for training; a prompt is neither cut nor filled up.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._template = _default_template(tokenizer)
        self._bos: int | None = tokenizer.bos_token_id
        self._adds_bos = self._bos is not None and self._encode("a")[:1] == [self._bos]
        self._token_bytes = TokenBytes(self._backend)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self.stop_token_ids = stop_token_ids | _ids(tokenizer.eos_token_id)

    @classmethod
    def load(cls, checkpoint: str | Path) -> "TextCodec":
        folder = Path(checkpoint)
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(
                f"{folder} has no tokenizer.json: only fast tokenizers are served. Convert a slow one with"
                " transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)."
            )
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        return cls(tokenizer, stop_token_ids=_configured_stop_ids(folder))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def detokenizer(self, prompt_token_ids: Sequence[int]) -> Detokenizer:
        return Detokenizer(self._token_bytes, prompt_token_ids)

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        return await self._off_loop(lambda: self._encode_chat(messages))

    async def encode_prompt(self, prompt: str) -> tuple[int, ...]:
        return await self._off_loop(lambda: self._encode_prompt(prompt))

    async def _off_loop(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        if self._template is None:
            raise PromptError("This model has no chat template; use /v1/completions.")
        conversation = [_template_data(message, self._template) for message in messages]
        rendered = self._render(conversation, self._template)
        return self._with_bos(self._encode(rendered, add_special_tokens=False))

    def _encode_prompt(self, prompt: str) -> tuple[int, ...]:
        return self._with_bos(self._encode(prompt))

    def _render(self, conversation: list[dict[str, str]], template: str) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    conversation, chat_template=template, tokenize=False, add_generation_prompt=True
                )
            )
        except TemplateError as error:
            raise PromptError(f"The model's chat template refuses these messages: {error.message}") from error
        except Exception as error:
            # Templates come with checkpoints, and some meet an unforeseen message with a TypeError.
            raise PromptError("The model's chat template cannot render these messages.") from error

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # Without offsets, which nobody asks for: half the time, and the interpreter is free meanwhile.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def _with_bos(self, token_ids: list[int]) -> tuple[int, ...]:
        """With exactly one BOS where the tokenizer would put one, whether or not the text has it as well."""
        if self._bos is None:
            if not token_ids:
                raise PromptError("The prompt is empty, and this model has no token that begins a text.")
            return tuple(token_ids)
        if self._adds_bos or not token_ids:
            start = next((i for i, token_id in enumerate(token_ids) if token_id != self._bos), len(token_ids))
            return (self._bos, *token_ids[start:])
        return tuple(token_ids)


def _default_template(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Of several named templates, as some checkpoints have for tools or retrieval, the plain one."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def _template_data(message: ChatMessage, template: str) -> dict[str, str]:
    """A template that has never heard of developers would drop their message without a word."""
    data = message.model_dump(exclude_none=True)
    if message.role == "developer" and "developer" not in template:
        data["role"] = "system"
    return data


def _configured_stop_ids(folder: Path) -> frozenset[int]:
    """Checkpoints name their end tokens in several places; in some of them no single place is complete."""
    stop_ids: frozenset[int] = frozenset()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            stop_ids |= _ids(config.get("eos_token_id"))
    return stop_ids


def _ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
