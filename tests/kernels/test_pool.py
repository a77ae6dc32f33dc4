"""One thread pool serves every caller: threads, forked children, those with odd floating-point modes."""

import os
import threading
import time

import pytest
import torch
from torch import Tensor

from shoal.kernels.cpu import CpuBackend
from tests.kernels.helpers import BEST, same_bits


def problem(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(40, 300, generator=generator), torch.randn(500, 300, generator=generator)


def test_callers_at_once_get_their_own_right_bits() -> None:
    problems = [problem(seed) for seed in range(4)]
    packed = [BEST.pack([w]) for _, w in problems]
    wrong: list[int] = []

    def compute(i: int, threads: int) -> Tensor:
        return CpuBackend(threads).linear(problems[i][0], packed[i], torch.empty(40, 500))

    expected = [compute(i, threads=1) for i in range(4)]

    def call_often(i: int) -> None:
        for threads in (1, 2, 3, 4) * 60:
            if not same_bits(compute(i, threads), expected[i]):
                wrong.append(i)

    callers = [threading.Thread(target=call_often, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_the_gil_is_free_while_a_kernel_runs() -> None:
    x, w = torch.randn(512, 1024), BEST.pack([torch.randn(2048, 1024)])
    ticks = 0
    done = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0)

    ticker = threading.Thread(target=tick)
    ticker.start()
    out = torch.empty(512, 2048)
    before = ticks
    for _ in range(5):
        BEST.linear(x, w, out)
    during = ticks - before
    done.set()
    ticker.join()
    assert during > 5  # a held GIL would let it tick about once a call


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_computes_the_same() -> None:
    x, w = problem(0)
    packed = BEST.pack([w])

    def compute() -> bytes:  # nothing of torch that may run in threads: its own pool does not survive a fork
        return BEST.linear(x, packed, torch.empty(40, 500)).numpy().tobytes()

    expected = compute()  # the parent's workers exist by now
    enough = threading.Event()

    def keep_computing() -> None:  # so that some forks happen in the middle of a call
        while not enough.is_set():
            compute()

    caller = threading.Thread(target=keep_computing)
    caller.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                os._exit(0 if all(compute() == expected for _ in range(20)) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        enough.set()
        caller.join()


def test_a_callers_denormal_mode_does_not_reach_the_kernels() -> None:
    x, w = torch.full((64, 64), 1e-20), BEST.pack([torch.full((64, 64), 1e-20)])
    denormal = BEST.linear(x, w, torch.empty(64, 64))
    assert (denormal > 0).all()
    torch.set_flush_denormal(True)
    try:
        assert same_bits(BEST.linear(x, w, torch.empty(64, 64)), denormal)
        assert same_bits(CpuBackend(1).linear(x, w, torch.empty(64, 64)), denormal)
    finally:
        torch.set_flush_denormal(False)
