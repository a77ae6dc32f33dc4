"""Checkpoints for tests: a real small model, a tiny random one, and one that only looks like a checkpoint."""

import json
import struct
from functools import cache
from pathlib import Path
from typing import Any, Literal

from shoal.cluster.sources import LineProgress, resolve_model

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TINY_LLAMA: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@cache
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, as `shoal serve` without a model finds it. The first time takes a minute."""
    return resolve_model(None, progress=LineProgress()).directory


def tiny_llama(
    directory: Path,
    *,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16",
    **overrides: Any,
) -> Path:
    """Write a random llama and its tokenizer; equal arguments give equal bytes."""
    # Imported here, because most users of this module need no torch.
    import torch  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    config = LlamaConfig(
        **(TINY_LLAMA | {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2} | overrides),
        dtype=getattr(torch, dtype),
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config)
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)  # all ones would hide a norm whose weight is left out
            else:
                # Large enough that the next token depends on the whole context, not on the last token alone.
                weight.normal_(std=1.5 * config.hidden_size**-0.5)
        model.to(getattr(torch, dtype)).save_pretrained(directory)
    write_tiny_tokenizer(directory, vocab_size=config.vocab_size)
    return directory


def write_tiny_tokenizer(directory: Path, *, vocab_size: int = 512) -> None:
    """Byte-level BPE: three special tokens, all bytes, then pairs of frequent letters, at most 512 in all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if vocab_size < len(tokens):
        raise ValueError(
            f"a tiny llama needs a vocabulary of at least {len(tokens)} tokens, not {vocab_size}"
        )
    letters = "Ġetaoinshrdlcumf"
    pairs = [(left, right) for left in letters for right in letters][: min(vocab_size, 512) - len(tokens)]
    vocab = {token: token_id for token_id, token in enumerate([*tokens, *map("".join, pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # As llama's own: a plain prompt gets a BOS, so a chat prompt must not get a second one.
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    wrapped: Any = PreTrainedTokenizerFast
    wrapped(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(directory)


def hollow_checkpoint(directory: Path) -> Path:
    """A folder with everything that a checkpoint must have, and nothing in it to compute with."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(safetensors_bytes())
    return directory


def safetensors_bytes(num_values: int = 4) -> bytes:
    header = {"w": {"dtype": "F32", "shape": [num_values], "data_offsets": [0, 4 * num_values]}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(4 * num_values)
