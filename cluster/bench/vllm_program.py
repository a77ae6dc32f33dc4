"""A program, `vllm_program.py FD SETTINGS`: vLLM's engine, told what to do in lines of JSON.

It runs in the interpreter of whoever has vLLM installed and imports nothing of ours. What it is told and what
it answers passes over the socket FD, because vLLM logs to stdout. SETTINGS is JSON: the arguments of LLM().

    {"decode": [[1, 2], ...], "max_tokens": n}  new sequences, up to their first token -> {}
    {"steps": 8}                                so many steps of all of them           -> {"seconds": s}
    {"prefill": [1, 2, ...]}                    a prompt, up to its first token        -> {"seconds": s}
"""

import ctypes
import itertools
import json
import signal
import socket
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]


class Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._engine = LLM(**settings).llm_engine
        self._new_ids = itertools.count()
        self._running: list[str] = []

    @property
    def dtype(self) -> str:
        return str(self._engine.model_config.dtype).removeprefix("torch.")

    def decode(self, prompts: list[list[int]], max_tokens: int) -> None:
        self._abort_all()
        self._running = [self._submit(prompt, max_tokens) for prompt in prompts]
        spoken: set[str] = set()
        while len(spoken) < len(prompts):
            spoken.update(output.request_id for output in self._engine.step())

    def steps(self, num_steps: int) -> float:
        started = time.perf_counter()
        num_tokens = sum(len(self._engine.step()) for _ in range(num_steps))
        seconds = time.perf_counter() - started
        assert num_tokens == num_steps * len(self._running), "every step decodes the whole batch"
        return seconds

    def prefill(self, prompt: list[int]) -> float:
        self._abort_all()
        started = time.perf_counter()
        self._submit(prompt, 1)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.perf_counter() - started

    def _submit(self, prompt: list[int], max_tokens: int) -> str:
        request_id = str(next(self._new_ids))
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
        return request_id

    def _abort_all(self) -> None:
        if self._running:
            self._engine.abort_request(self._running)
        self._running = []
        while self._engine.has_unfinished_requests():
            self._engine.step()


def die_with_parent() -> None:
    """Even while it compiles, which takes minutes: else it would go on for nobody."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # <linux/prctl.h>
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main(fd: int, settings: dict[str, Any]) -> None:
    die_with_parent()
    channel = socket.socket(fileno=fd).makefile("rw")

    def answer(what: dict[str, Any]) -> None:
        channel.write(json.dumps(what) + "\n")
        channel.flush()

    engine = Engine(settings)
    answer({"dtype": engine.dtype})
    for line in channel:
        match json.loads(line):
            case {"decode": prompts, "max_tokens": max_tokens}:
                engine.decode(prompts, max_tokens)
                answer({})
            case {"steps": num_steps}:
                answer({"seconds": engine.steps(num_steps)})
            case {"prefill": prompt}:
                answer({"seconds": engine.prefill(prompt)})


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
