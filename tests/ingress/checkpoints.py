"""The text side of tiny checkpoints, of the two kinds that people serve."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the quick brown fox jumps over the lazy dog. " * 4,
    "Hello world, naïve café! 日本語 😀 alpha beta gamma",
]

CHAT_TEMPLATE = """{{ bos_token }}{% for message in messages -%}
{% if message.role == "user" and not loop.first and loop.previtem.role == "user" -%}
{{ raise_exception("Conversation roles must alternate") }}{% endif -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


def byte_level_tokenizer() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen: any token may hold a part of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """As Llama 2, Mistral, Gemma: "▁" for a space, none where a text begins, and <0xNN> for rare bytes."""
    trained = Tokenizer(models.BPE())
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.normalizer = normalizer
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=specials, show_progress=False)
    trained.train_from_iterator(CORPUS[:1], trainer)
    model: dict[str, Any] = json.loads(trained.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(specials)
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def adding_bos(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def save_checkpoint(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    bos_token: str | None = "<s>",
    chat_template: str | None = CHAT_TEMPLATE,
    configs: Mapping[str, Any] | None = None,
) -> Path:
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token=bos_token, eos_token="</s>"
    )
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    for name, config in (configs or {}).items():
        (folder / name).write_text(json.dumps(config))
    return folder


def token_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


@cache
def the_byte_level_tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


def tokens_of(text: str) -> tuple[int, ...]:
    return tuple(the_byte_level_tokenizer().encode(text).ids)


def text_of(token_ids: Sequence[int]) -> str:
    return the_byte_level_tokenizer().decode(list(token_ids), skip_special_tokens=False)
