"""Hugging Face transformers as a bench peer: static cache, greedy, in this process."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StaticCache
from transformers.utils.logging import disable_progress_bar

from shoal.cluster.bench.contender import DECODE_STEPS, MEASURED_STEPS, Case, Dtype, Turn, timed


class TransformersPeer:
    def __init__(self, checkpoint: Path, threads: int, dtype: Dtype) -> None:
        torch.set_num_threads(threads)
        disable_progress_bar()  # type: ignore[no-untyped-call]
        model: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
        )
        self._model = model.eval()
        self._dtype = dtype

    @property
    def dtype(self) -> str:
        return self._dtype

    def turn(self, case: Case, prompts: list[list[int]]) -> Turn:
        tokens = torch.tensor(prompts)
        if case.phase == "prefill":
            return timed(lambda: self._prefill(tokens))
        cache = self._cache(case.context + MEASURED_STEPS)
        last = self._next(tokens, cache)

        def decode() -> None:
            nonlocal last
            for _ in range(DECODE_STEPS):
                last = self._next(last, cache)

        return timed(decode)

    def _prefill(self, prompt: torch.Tensor) -> None:
        self._next(prompt, self._cache(prompt.shape[1]))

    def _cache(self, num_tokens: int) -> StaticCache:
        return StaticCache(config=self._model.config, max_cache_len=num_tokens)

    @torch.inference_mode()
    def _next(self, tokens: torch.Tensor, cache: StaticCache) -> torch.Tensor:
        """Greedy continuations, [batch, 1], of tokens, [batch, length]."""
        logits = self._model(tokens, cache=cache, use_cache=True, logits_to_keep=1).logits
        return torch.argmax(logits[:, -1], dim=-1, keepdim=True)
