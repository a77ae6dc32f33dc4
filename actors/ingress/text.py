"""Between people's text and the model's tokens: chat template, tokenizer, end-of-sequence tokens.

The tokenizer is read through `PreTrainedTokenizerFast`, not `AutoTokenizer`: it takes tokenizer.json as it
is, and importing it does not import torch, which would cost the front door three seconds and 200 MB.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from shoal.actors.ingress.detokenizer import TokenBytes, written_text
from shoal.actors.ingress.protocol import ChatMessage

LOSS = 4
"""So much longer may a text be where a tokenizer does not keep all of it: NFC makes 9 bytes of Hangul 3."""


class PromptError(ValueError):
    """This text cannot become a prompt of this model; the message is for the client."""


class TextCodec:
    """A checkpoint's tokenizer, for any number of threads. A long prompt takes it seconds."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, *, stop_token_ids: frozenset[int], num_token_ids: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # What tokenizer.json says of these was meant for training; a prompt is neither cut nor filled up.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._template = _default_template(tokenizer)
        self._bos: int | None = tokenizer.bos_token_id
        self._adds_bos = self._bos is not None and self.encode_plainly("a", True)[:1] == (self._bos,)
        self.token_bytes = TokenBytes(self._backend)
        self._max_token_bytes = self.token_bytes.longest() * (LOSS if _loses_text(self._backend) else 1)
        self.stop_token_ids = stop_token_ids | _ids(tokenizer.eos_token_id)
        self.num_token_ids = len(tokenizer) if num_token_ids is None else num_token_ids
        """Those that the model has a row for; often more than the tokenizer has tokens."""

    @classmethod
    def load(cls, checkpoint: str | Path) -> "TextCodec":
        folder = Path(checkpoint)
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(
                f"{folder} has no tokenizer.json: only fast tokenizers are served. Convert a slow one with"
                " transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)."
            )
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        config = _json(folder / "config.json")
        generation_config = _json(folder / "generation_config.json")
        # Checkpoints name their end tokens in several places; in some of them no single place is complete.
        stop_token_ids = _ids(generation_config.get("eos_token_id")) | _ids(config.get("eos_token_id"))
        num_token_ids = config.get("text_config", config).get("vocab_size")
        return cls(tokenizer, stop_token_ids=stop_token_ids, num_token_ids=num_token_ids)

    def fewest_tokens(self, text: str) -> int:
        """As how many a text counts before it is tokenized: a long one takes seconds and gigabytes."""
        return -(-len(text.encode()) // self._max_token_bytes)

    def render_chat(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        if self._template is None:
            raise PromptError("This model has no chat template; use /v1/completions.")
        conversation = [_template_data(message, self._template) for message in messages]
        return self._render(conversation, self._template, add_generation_prompt)

    def encode_chat(self, rendered: str) -> tuple[int, ...]:
        return self._with_bos(self.encode_plainly(rendered, add_special_tokens=False))

    def encode_prompt(self, prompt: str) -> tuple[int, ...]:
        return self._with_bos(self.encode_plainly(prompt, add_special_tokens=True))

    def encode_plainly(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """As the tokenizer does it, whatever becomes of the BOS."""
        # Without offsets, which nobody asks for: half the time, and the interpreter is free meanwhile.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, goes_on: bool = False) -> str:
        """With the special tokens as they are written; a character that will yet be completed is left out."""
        return written_text(self.token_bytes, token_ids, goes_on=goes_on)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """As the vocabulary has them, spaces and half characters in the tokenizer's own notation."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def _render(self, conversation: list[dict[str, str]], template: str, add_generation_prompt: bool) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    conversation,
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                )
            )
        except TemplateError as error:
            raise PromptError(f"The model's chat template refuses these messages: {error.message}") from error
        except Exception as error:
            # Templates come with checkpoints, and some meet an unforeseen message with a TypeError.
            raise PromptError("The model's chat template cannot render these messages.") from error

    def _with_bos(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """With exactly one BOS where the tokenizer would put one, whether or not the text has it as well."""
        if self._bos is None:
            if not token_ids:
                raise PromptError("The prompt is empty, and this model has no token that begins a text.")
            return token_ids
        if self._adds_bos or not token_ids:
            start = next((i for i, token_id in enumerate(token_ids) if token_id != self._bos), len(token_ids))
            return (self._bos, *token_ids[start:])
        return token_ids


def _default_template(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Of several named templates, as some checkpoints have for tools or retrieval, the plain one."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def _loses_text(tokenizer: Tokenizer) -> bool:
    """Normalizers shorten a text, and some special tokens swallow the spaces beside them."""
    added = tokenizer.get_added_tokens_decoder().values()
    return tokenizer.normalizer is not None or any(token.lstrip or token.rstrip for token in added)


def _template_data(message: ChatMessage, template: str) -> dict[str, str]:
    """A template that has never heard of developers would drop their message without a word."""
    data = message.model_dump(exclude_none=True)
    if message.role == "developer" and "developer" not in template:
        data["role"] = "system"
    return data


def _json(path: Path) -> dict[str, Any]:
    """{} where there is no such file."""
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return config


def _ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
