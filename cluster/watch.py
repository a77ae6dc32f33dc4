"""One actor kept alive: started, pinged with a deadline, replaced. Plain state over futures and a clock."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from textwrap import shorten
from typing import Any, Generic, Protocol, TypeVar

START_TIMEOUT_S = 900.0
"""Unless chosen otherwise. Getting and loading a model may take this long: far longer than a ping may."""

PING_DEADLINE_S = 10.0
PING_INTERVAL_S = 1.0

PULSE_DEADLINE_S, PULSE_INTERVAL_S = 60.0, 5.0
"""While it starts, libraries that are imported may keep its event loop for some seconds."""

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0

TROUBLE_CHARS = 240
"""Of what went wrong, so that people read it."""


class Process(Protocol):
    """An actor as the supervisor sees it. Futures fail with what ended the call."""

    @property
    def process_id(self) -> str: ...

    def start(self) -> Future[Any]:
        """Idempotent: an adopted actor that serves already answers at once."""
        ...

    def ping(self) -> Future[bool]:
        """True: healthy. False: it answers but is past mending, as a hung step thread is."""
        ...

    def pulse(self) -> Future[Any]:
        """Answers while its event loop turns, be it ready or not. A text is what its start is at."""
        ...

    def kill(self) -> None:
        """It ends, even if it hangs."""
        ...


class State(StrEnum):
    ABSENT = "absent"
    STARTING = "starting"
    READY = "ready"


@dataclass(slots=True)
class _Call:
    future: Future[Any]
    since: float


P = TypeVar("P", bound=Process)


class Watched(Generic[P]):
    """Keeps one process of a role running. Call `tick` often; it never blocks.

        ABSENT ──launch──▶ STARTING ──start() answers──▶ READY
           ▲                   │ error, no pulse, too long │ ping fails or is late
           └───────────────────┴───────────────────────────┘  kill, wait, launch anew

    A ValueError from the first start() is a wrong configuration: `fatal` names it, and nothing is tried
    again. Once the role has been ready, or if the cluster can do without it, every failure is tried again,
    ever more slowly.
    """

    def __init__(
        self,
        launch: Callable[[], P],
        clock: Callable[[], float],
        adopted: P | None = None,
        *,
        essential: bool = True,
        accept: Callable[[Any], None] = lambda info: None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """accept: raises ValueError if one that says this of itself, once it is ready, is not wanted after
        all. start_timeout_s: from when it was first heard."""
        self._launch = launch
        self._accept = accept
        self.start_timeout_s = start_timeout_s
        self._clock = clock
        self._process: P | None = None
        self._starting: _Call | None = None
        self._pulse: _Call | None = None
        self._ping: _Call | None = None
        self._last_answer = 0.0
        self._retry_at = clock()
        self._retry_s = FIRST_RETRY_S
        self.info: Any = None
        self.fatal: str | None = None
        self.trouble: str | None = None
        """Why it is not ready, if something failed."""
        self._may_be_fatal = essential
        self.adopting = adopted is not None
        """It was left by an earlier supervisor, and has not said yet that it is ready."""
        self.has_had_pulse = False
        self.doing: str | None = None
        """What its start is at, if it says so."""
        self.answered_at = 0.0
        """When the last ping that was answered had been sent."""
        self.num_failures = 0
        """Of processes that it had, or could not have."""
        if adopted is not None:
            self._begin(adopted)

    @property
    def state(self) -> State:
        if self._process is None:
            return State.ABSENT
        return State.STARTING if self._starting else State.READY

    @property
    def process(self) -> P | None:
        """Be it ready or not."""
        return self._process

    @property
    def ready(self) -> P | None:
        return self._process if self.state is State.READY else None

    def tick(self) -> None:
        if self.fatal:
            return
        match self.state:
            case State.ABSENT:
                if self._clock() >= self._retry_at:
                    self._try_launch()
            case State.STARTING:
                self._check_start()
            case State.READY:
                self._check_ping()

    def kill(self) -> None:
        """If it raises nothing has changed: it is to be called again."""
        if self._process is not None:
            self._process.kill()
        self._process = self._starting = self._pulse = self._ping = self.info = self.doing = None
        self.adopting = False

    def _try_launch(self) -> None:
        try:
            self._begin(self._launch())
        except Exception as error:  # e.g. the name of a dying predecessor is not free yet
            self._retry_later(error)

    def _begin(self, process: P) -> None:
        self._process = process
        self._starting = _Call(process.start(), self._clock())
        self._pulse = _Call(process.pulse(), self._clock())
        self.has_had_pulse = False

    def _check_start(self) -> None:
        call = self._starting
        assert call is not None
        if not call.future.done():
            if self._clock() - call.since > self.start_timeout_s:
                self._retry_later(TimeoutError(f"not started within {self.start_timeout_s:.0f} s"))
            else:
                self._check_pulse(call)
            return
        error = call.future.exception() or self._objection(call.future.result())
        if isinstance(error, ValueError) and self._may_be_fatal:
            self.kill()
            self.fatal = str(error)
        elif error is not None:
            self._retry_later(error)
        else:
            self.info = call.future.result()
            self.trouble = self._starting = self._pulse = self.doing = None
            self._may_be_fatal = self.adopting = False
            self._last_answer = self._clock()

    def _objection(self, info: Any) -> ValueError | None:
        try:
            self._accept(info)
        except ValueError as error:
            return error
        return None

    def _check_pulse(self, start: _Call) -> None:
        """One of which nothing was ever heard waits for room somewhere. But if it was adopted it may hang."""
        assert self._process is not None and self._pulse is not None
        now, pulse = self._clock(), self._pulse
        if pulse.future.done():
            if not self.has_had_pulse:
                self.has_had_pulse, start.since = True, now
            if pulse.future.exception() is None:
                self.doing = pulse.future.result() or None
            if now - pulse.since > PULSE_INTERVAL_S:
                self._pulse = _Call(self._process.pulse(), now)
        elif now - pulse.since > PULSE_DEADLINE_S:
            if self.has_had_pulse or self.adopting:
                self._retry_later(TimeoutError(f"no sign of life within {PULSE_DEADLINE_S:.0f} s"))
            else:
                self._pulse = _Call(self._process.pulse(), now)

    def _check_ping(self) -> None:
        assert self._process is not None
        now = self._clock()
        if self._ping is None:
            if now - self._last_answer >= PING_INTERVAL_S:
                self._ping = _Call(self._process.ping(), now)
        elif self._ping.future.done():
            error = self._ping.future.exception()
            if error is None and self._ping.future.result():
                self.answered_at = self._ping.since
                self._ping = None
                self._last_answer = now
                self._retry_s = FIRST_RETRY_S
            else:
                self._retry_later(error or RuntimeError("it reports that it hangs"))
        elif now - self._ping.since > PING_DEADLINE_S:
            self._retry_later(TimeoutError(f"no answer within {PING_DEADLINE_S:.0f} s"))

    def _retry_later(self, error: BaseException) -> None:
        self.kill()
        self.num_failures += 1
        self.trouble = f"{type(error).__name__}: {last_line(error)}"
        self._retry_at = self._clock() + self._retry_s
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)


def last_line(error: BaseException) -> str:
    """Errors from another process carry its whole trace; the last line says what it was. Ray goes on from
    there to all that may ever end a process."""
    lines = str(error).strip().splitlines()
    return shorten(lines[-1], TROUBLE_CHARS, placeholder=" …") if lines else ""
