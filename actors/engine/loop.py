"""The engine's own thread: commands in, steps, replies out."""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence

from shoal.actors.engine.engine import Engine
from shoal.actors.engine.scheduler import Reply

logger = logging.getLogger(__name__)

Command = Callable[[Engine], Sequence[Reply]]
"""Something to do between two steps, and what it has to say."""

Deliver = Callable[[Sequence[Reply], int], None]
"""Takes what a turn has to say, and how many requests the engine has after it. It may ask the engine more."""


class EngineLoop:
    """Steps an engine while it can; sleeps on its inbox while nothing can run.

    Only this thread touches the engine, so nothing in it needs a lock; `deliver` too is called on it. Once it
    has been idle for a while it checks every invariant. When one is broken the process ends: its memory
    cannot be trusted, and a supervisor replaces it.
    """

    def __init__(self, engine: Engine, deliver: Deliver, *, idle_wait_s: float = 1.0) -> None:
        """idle_wait_s: how long it sleeps at a time; a beat and an idle engine's check are as far apart."""
        self._engine = engine
        self._idle_wait_s = idle_wait_s
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._beat = time.monotonic()
        self._checked = True
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def do(self, command: Command) -> None:
        """Run a command between two steps. From any thread."""
        self._inbox.put(command)

    def post(self, work: Callable[[], None]) -> None:
        """The same for what has nothing to say."""

        def command(_: Engine) -> Sequence[Reply]:
            work()
            return ()

        self.do(command)

    @property
    def seconds_since_beat(self) -> float:
        """How long ago the thread last came round. Long means that a step hangs."""
        return time.monotonic() - self._beat

    def turn(self) -> None:
        """Drain the inbox, take one step, say what came of it, while the next one computes."""
        self._beat = time.monotonic()
        had_work = self._engine.has_work
        commands = self._commands(wait_s=0.0 if self._engine.can_step else self._idle_wait_s)
        replies = [reply for command in commands for reply in command(self._engine)]
        replies += self._engine.step()
        if commands or had_work:
            self._deliver(replies, self._engine.num_requests)
            self._checked = False
        elif not self._checked:  # idle for a while: nobody waits for it now
            self._engine.check()
            self._checked = True

    def _run(self) -> None:
        try:
            while True:
                self.turn()
        except BaseException:
            logger.critical("engine loop broken; ending the process", exc_info=True)
            logging.shutdown()
            os._exit(1)

    def _commands(self, *, wait_s: float) -> list[Command]:
        commands: list[Command] = []
        try:
            if wait_s:
                commands.append(self._inbox.get(timeout=wait_s))
            while True:
                commands.append(self._inbox.get_nowait())
        except queue.Empty:
            return commands
