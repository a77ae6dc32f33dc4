"""Which backend serves on this machine's CPU."""

import logging

from shoal.kernels.backend import Backend
from shoal.kernels.cpu import CpuBackend
from shoal.kernels.library import KernelsUnavailable
from shoal.kernels.reference import TorchBackend

logger = logging.getLogger(__name__)


def choose_backend(threads: int, *, require_kernels: bool = False) -> Backend:
    """The compiled kernels, or plain torch with one loud line where there are none and none can be built."""
    try:
        return CpuBackend(threads)
    except KernelsUnavailable as why:
        if require_kernels:
            raise
        logger.warning("serving with plain torch, many times slower and not exact: %s", why)
        return TorchBackend()
