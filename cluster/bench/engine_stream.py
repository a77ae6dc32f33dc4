"""What an engine actor says to a benchmark that asks it without a front door."""

import time
from collections.abc import Iterator
from typing import Any

import ray

from shoal.actors.messages import IngressId, TokenBatch, TokenChunk

INGRESS = IngressId("bench")
CALL_DEADLINE_S = 60.0


class EngineFailed(Exception):
    """An engine that is measured does not answer as it should; one line for the operator."""


class EngineStream:
    """Of all that is submitted to the engine for INGRESS."""

    def __init__(self, engine: Any) -> None:
        self._stream = engine.stream.options(num_returns="streaming").remote(INGRESS)

    def chunks(self, within_s: float) -> Iterator[TokenChunk]:
        """As they come. Raises EngineFailed if a request fails, or if whoever listens still waits after so
        long."""
        deadline = time.monotonic() + within_s
        while True:
            ready, _ = ray.wait([self._stream], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise EngineFailed(f"an engine gave no answer within {within_s:.0f} s")
            batch: TokenBatch = ray.get(next(self._stream), timeout=CALL_DEADLINE_S)
            for chunk in batch.chunks:
                if chunk.error is not None:
                    raise EngineFailed(f"an engine failed: {chunk.error.message}")
                yield chunk
