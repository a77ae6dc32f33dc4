"""Several answers to one prompt: what each of them asks for, and which of them are shown."""

from dataclasses import dataclass, replace
from hashlib import blake2b

from shoal.actors.ingress.errors import bad_request
from shoal.actors.ingress.protocol import MAX_ANSWERS, CompletionRequest
from shoal.actors.ingress.stop_strings import StopString
from shoal.actors.messages import EngineRequest, RequestId
from shoal.kvstore.block_hash import BlockKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One choice of an answer: what an engine computes for it, and what is shown of that."""

    request: EngineRequest
    block_keys: tuple[BlockKey, ...] = ()
    stop: tuple[StopString, ...] = ()
    echo: str | None = None
    """The prompt as text, if the answer begins with it."""
    is_silent: bool = False
    """Only the prompt is of interest. An engine draws at least one token, which is dropped."""


def choices_of(asked: Asked, num_choices: int) -> tuple[Asked, ...]:
    """The same as often, but for the names and the seeds."""
    request = asked.request
    if num_choices == 1:
        return (asked,)
    return tuple(
        replace(
            asked,
            request=replace(
                request,
                request_id=RequestId(f"{request.request_id}-{index}"),
                group=request.request_id,
                sampling=replace(request.sampling, seed=seed_of(request.sampling.seed, index)),
            ),
        )
        for index in range(num_choices)
    )


def seed_of(seed: int, index: int) -> int:
    """Of one of a prompt's choices. The first has the request's own, so that it says what it would say alone;
    no other is that of a neighbouring seed's choice."""
    if not index:
        return seed
    digest = blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def num_candidates(body: CompletionRequest) -> int:
    """Answers to each prompt, be it that not all of them are shown. Raises ApiError if they cannot be had."""
    n, best_of = body.n or 1, body.best_of
    param = "n" if best_of is None else "best_of"
    if best_of is not None and best_of < n:
        raise bad_request(f"best_of: {best_of} answers are fewer than the {n} that n asks for.", param=param)
    if is_to_be_ranked(body) and body.stream:
        raise bad_request(
            "best_of: which answers are the best is known when all have ended, so they cannot be streamed.",
            param=param,
        )
    num_choices = best_of or n
    if len(body.prompt) * num_choices > MAX_ANSWERS:
        raise bad_request(
            f"{param}: {num_choices} answers to each of {len(body.prompt)} prompts are more than "
            f"{MAX_ANSWERS}.",
            param=param,
        )
    return num_choices


def is_to_be_ranked(body: CompletionRequest) -> bool:
    return body.best_of is not None and body.best_of > (body.n or 1)
