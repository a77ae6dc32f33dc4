"""Which requests an engine cannot run, and why: answers that need no waiting."""

from shoal.actors.engine.block_pool import Admission
from shoal.actors.engine.pools import Pools, blocks_needed
from shoal.actors.messages import EngineRequest, ErrorKind, RequestError


class Refusals:
    """Judges a request by what the model can compute and the engine can ever hold."""

    def __init__(
        self,
        pools: Pools,
        *,
        max_model_len: int,
        vocab_size: int,
        max_requests: int,
        max_queued_tokens: int,
    ) -> None:
        self._pools = pools
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._max_requests = max_requests
        self._max_queued_tokens = max_queued_tokens

    def refusal(
        self, request: EngineRequest, *, num_requests: int, num_queued_tokens: int
    ) -> RequestError | None:
        """None if it can run, in its turn. num_requests: those that run or wait. num_queued_tokens: of those
        that wait; where none does, the longest prompt may come."""
        return self._never(request) or self._not_now(request, num_requests, num_queued_tokens)

    def _never(self, request: EngineRequest) -> RequestError | None:
        prompt = request.prompt_token_ids
        if message := self._mistake(request):
            return RequestError(kind=ErrorKind.INVALID, message=message)
        asked = f"{len(prompt)} prompt tokens and {request.max_tokens} output tokens"
        if len(prompt) + request.max_tokens > self._max_model_len:
            message = f"{asked} exceed the context of {self._max_model_len} tokens"
            return RequestError(kind=ErrorKind.NEVER_FITS, message=message)
        positions = len(prompt) + request.max_tokens - 1  # the last drawn token is never computed
        if self._pools.admission(positions) is Admission.NEVER:
            needed = blocks_needed(history=positions, block_size=self._pools.block_size)
            message = (
                f"{asked} need {needed} KV blocks of {self._pools.block_size} tokens; "
                f"this engine has {self._pools.blocks.num_usable} in all"
            )
            return RequestError(kind=ErrorKind.NEVER_FITS, message=message)
        return None

    def _not_now(
        self, request: EngineRequest, num_requests: int, num_queued_tokens: int
    ) -> RequestError | None:
        """An answer that has begun elsewhere is let in: it was let in once."""
        if request.has_begun:
            return None
        if num_requests >= self._max_requests:
            message = f"the engine is full: {num_requests} requests run or wait"
        elif num_queued_tokens and num_queued_tokens + request.num_tokens > self._max_queued_tokens:
            message = f"the engine is full: {num_queued_tokens} tokens wait"
        else:
            return None
        return RequestError(kind=ErrorKind.OVERLOADED, message=message)

    def _mistake(self, request: EngineRequest) -> str | None:
        """Why no engine of this model can compute the request."""
        if not request.prompt_token_ids or request.max_tokens < 1:
            return "a request needs at least one prompt token and max_tokens of at least 1"
        if len(request.output_token_ids) >= request.max_tokens:
            return f"of max_tokens {request.max_tokens} there are {len(request.output_token_ids)} already"
        biased = [token for token, _ in request.sampling.logit_bias]
        given = {
            "prompt": request.prompt_token_ids,
            "output": request.output_token_ids,
            "logit_bias": biased,
        }
        for what, token_ids in given.items():
            if not 0 <= min(token_ids, default=0) <= max(token_ids, default=0) < self._vocab_size:
                return f"token ids of {what} must be from 0 to {self._vocab_size - 1}"
        return None
