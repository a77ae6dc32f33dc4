"""How much a key may ask for: requests and tokens a minute, and requests at once."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.actors.ingress.errors import RateLimited

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None


class Bucket:
    """Fills at `per_minute`, up to what a minute brings.

    It may be overdrawn, by what nobody could know beforehand; what comes in then pays the debt first. So over
    any time no more is taken than a bucketful, what the time brought, and the debt.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.per_minute = per_minute
        self._level: float = per_minute
        self._as_of = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._as_of) * self.per_minute / MINUTE_S)
        self._as_of = now
        return self._level

    def wait_s(self, amount: float) -> float:
        """Until so much can be taken; 0 if it can be now. More than a bucketful is given where it is full."""
        return self._until(min(amount, self.per_minute))

    def until_full_s(self) -> float:
        return self._until(self.per_minute)

    def _until(self, level: float) -> float:
        return max(0.0, level - self.level) * MINUTE_S / self.per_minute

    def take(self, amount: float) -> None:
        """Or give back, if it is negative; what is more than a bucketful is lost."""
        self._level = min(self.per_minute, self.level - amount)

    def change(self, per_minute: int) -> None:
        level = self.level
        self.per_minute = per_minute
        self._level = min(per_minute, level)


class Allowance:
    """What one key has left.

    A request counts when it is let in, whatever becomes of it. Tokens count as they are used, prompt and
    answer together, cached ones too; until that is known, the prompt and the `max_tokens` that a request
    names are held back. One that names none may overdraw by its answer.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.num_open = 0
        self.change(limits)

    def change(self, limits: Limits) -> None:
        self._requests = self._changed(self._requests, limits.requests_per_minute)
        self._tokens = self._changed(self._tokens, limits.tokens_per_minute)
        self.limits = limits

    def _changed(self, bucket: Bucket | None, per_minute: int | None) -> Bucket | None:
        if bucket is None or per_minute is None:
            return None if per_minute is None else Bucket(per_minute, self._clock)
        bucket.change(per_minute)
        return bucket

    @contextmanager
    def request(self) -> Iterator[None]:
        """Open until its answer has ended. Raises RateLimited if it may not come in now."""
        most = self.limits.max_concurrent
        if most is not None and self.num_open >= most:
            raise RateLimited("concurrent", f"{most} requests at once", wait_s=1.0)
        if self._requests is not None:
            if wait_s := self._requests.wait_s(1):
                raise RateLimited("requests", f"{self._requests.per_minute} requests a minute", wait_s=wait_s)
            self._requests.take(1)
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    def hold(self, num_tokens: int) -> "Hold":
        """So many may be used. Raises RateLimited if they are too many now."""
        if self._tokens is None:
            return Hold(self, 0)
        if wait_s := self._tokens.wait_s(num_tokens):
            limit = f"{self._tokens.per_minute} tokens a minute"
            raise RateLimited("tokens", limit, asked=num_tokens, wait_s=wait_s)
        self._tokens.take(num_tokens)
        return Hold(self, num_tokens)

    def settle(self, held: int, used: int) -> None:
        if self._tokens is not None:
            self._tokens.take(used - held)

    def headers(self) -> dict[str, str]:
        """OpenAI's: what is left, and how long until all of it is there again."""
        headers = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
                headers[f"x-ratelimit-reset-{name}"] = duration(bucket.until_full_s())
        return headers


@dataclass(frozen=True, slots=True)
class Hold:
    """Tokens that were taken before anybody knew how many it would be."""

    allowance: Allowance
    num_tokens: int

    def settle(self, used: int) -> None:
        """It was so many, and the rest is given back."""
        self.allowance.settle(self.num_tokens, used)


def duration(seconds: float) -> str:
    """As in OpenAI's headers: 20ms, 1.5s, 6m0s. Rounded up, so that nobody comes too early."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"
