"""The line that says what a start took: its parts add up."""

import time

from shoal.actors.messages import EngineId, EngineInfo
from shoal.cluster.start_time import StartTime, process_age_s


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def an_engine(*took_s: tuple[str, float]) -> EngineInfo:
    return EngineInfo(
        engine_id=EngineId("e"), node="n", backend="b", memory="m", fingerprint=b"", took_s=took_s
    )


def test_the_parts_are_named_and_add_up() -> None:
    clock = Clock()
    took = StartTime(clock, before_s=0.5)
    clock.now += 0.2
    took.until_here("command")
    clock.now += 3.4
    took.until_here("Ray")
    clock.now += 2.5
    engines = (
        an_engine(("imports", 1.0), ("weights", 0.4)),
        an_engine(("imports", 1.2), ("weights", 0.5), ("fingerprint", 0.01)),
    )
    took.until_engines(engines)
    clock.now += 0.3
    took.until_engines(engines)  # told again, as every poll does
    took.until_here("front door")
    assert took.describe() == (
        "ready in 6.9 s: command 0.7, Ray 3.4, engine 2.5 (imports 1.2, weights 0.5), front door 0.3"
    )


def test_a_part_that_took_nothing_is_left_out() -> None:
    clock = Clock()
    took = StartTime(clock, before_s=0.0)
    took.until_here("Ray")
    clock.now += 2.0
    took.until_engines([an_engine()])
    took.until_here("front door")
    assert took.describe() == "ready in 2.0 s: engine 2.0"


def test_the_age_of_this_process_grows_with_the_clock() -> None:
    before, age = time.monotonic(), process_age_s()
    assert age > 0
    assert process_age_s() - age <= time.monotonic() - before
