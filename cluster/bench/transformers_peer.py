"""Hugging Face transformers as a bench peer: float32, static cache, greedy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StaticCache
from transformers.utils.logging import disable_progress_bar

from shoal.cluster.bench.engine import DECODE_STEPS, ROUNDS


class TransformersPeer:
    def __init__(self, checkpoint: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        disable_progress_bar()  # type: ignore[no-untyped-call]
        model: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
        self._model = model.eval()

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]]) -> Callable[[], None]:
        num_tokens = len(prompts[0]) + DECODE_STEPS * (ROUNDS + 1)
        cache = StaticCache(config=self._model.config, max_cache_len=num_tokens)
        last = self._next(torch.tensor(prompts), cache)

        @torch.inference_mode()
        def steps() -> None:
            nonlocal last
            for _ in range(DECODE_STEPS):
                last = self._next(last, cache)

        return steps

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> None:
        self._next(torch.tensor([prompt]), StaticCache(config=self._model.config, max_cache_len=len(prompt)))

    def _next(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        logits = self._model(tokens, cache=cache, use_cache=True, logits_to_keep=1).logits
        return torch.argmax(logits[:, -1], dim=-1, keepdim=True)
