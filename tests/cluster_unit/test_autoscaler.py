"""How many engines are wanted, over a fake clock."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.actors.messages import EngineHealth
from shoal.cluster.autoscaler import Autoscaler, AutoscalingConfig

CONFIG = AutoscalingConfig(
    min_replicas=1,
    max_replicas=8,
    target_ongoing_requests=10,
    target_ttft_s=2.0,
    upscale_delay_s=10,
    downscale_delay_s=60,
)


def load(num_requests: int, tokens: int = 0, tokens_per_s: float = 0.0) -> EngineHealth:
    return EngineHealth(
        num_requests=num_requests, stalled=False, uncomputed_tokens=tokens, tokens_per_s=tokens_per_s
    )


class Scaled:
    """A cluster that is always at once as large as is wanted, and shares its load evenly."""

    def __init__(self, config: AutoscalingConfig = CONFIG, engines: int = 1) -> None:
        self.now = 0.0
        self.engines = engines
        self.sizes: list[int] = []
        self._autoscaler = Autoscaler(config, lambda: self.now)

    def bears(self, requests: Callable[[float], float], for_s: float, tokens_per_request: int = 0) -> None:
        for _ in range(int(for_s)):
            self.now += 1.0
            share = requests(self.now) / self.engines
            loads = [load(round(share), round(share * tokens_per_request), 1000.0)] * self.engines
            self.engines = self._autoscaler.wanted(loads, self.engines)
            self.sizes.append(self.engines)


def test_more_engines_come_when_more_are_needed_for_a_while() -> None:
    cluster = Scaled()
    cluster.bears(lambda _: 35, for_s=10)
    assert cluster.engines == 1
    cluster.bears(lambda _: 35, for_s=2)
    assert cluster.engines == 4


def test_a_burst_alone_changes_nothing() -> None:
    cluster = Scaled()
    cluster.bears(lambda now: 80 if now % 10 < 8 else 0, for_s=100)
    assert set(cluster.sizes) == {1}


def test_prompts_that_queue_count_beside_requests() -> None:
    cluster = Scaled()
    cluster.bears(lambda _: 5, for_s=20, tokens_per_request=1000)
    assert cluster.engines == 3, "5,000 tokens at 1,000 a second each, in 2 s"


def test_fewer_remain_after_a_long_lull_and_never_fewer_than_the_least() -> None:
    cluster = Scaled(engines=6)
    cluster.bears(lambda _: 60, for_s=60)
    cluster.bears(lambda now: 0 if now % 30 else 60, for_s=120)
    assert cluster.engines == 6
    cluster.bears(lambda _: 0, for_s=62)
    assert cluster.engines == 1


def test_load_at_a_boundary_does_not_make_it_waver() -> None:
    cluster = Scaled(engines=2)
    cluster.bears(lambda now: 18 if now % 120 < 60 else 22, for_s=1200)
    assert set(cluster.sizes[120:]) == {3}


def test_the_largest_number_is_kept_to_and_a_changed_range_is_entered_at_once() -> None:
    cluster = Scaled()
    cluster.bears(lambda _: 1000, for_s=30)
    assert cluster.engines == 8
    assert Autoscaler(CONFIG, lambda: 0.0).wanted([], 20) == 8


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"min_replicas": 0}, "min_replicas 0 must be from 1"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas 3 must be from 1 to max_replicas 2"),
        ({"target_ttft_s": 0.0}, "target_ttft_s must be above 0"),
        ({"upscale_delay_s": float("nan")}, "upscale_delay_s must be 0 or more"),
        ({"downscale_margin": 1.5}, "downscale_margin must be above 0 and at most 1"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AutoscalingConfig(**wrong)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 200), min_size=80, max_size=200), st.integers(1, 8))
def test_what_is_wanted_is_what_the_windows_say(requests: list[int], engines: int) -> None:
    """Against the plain definition, each second anew over all that was seen."""
    now = 0.0
    autoscaler = Autoscaler(CONFIG, lambda: now)
    for second in range(len(requests)):
        now = float(second)
        seen = requests[: second + 1]
        up = [-(-n // 10) for n in seen[-11:]]
        down = [-(-n // 8) for n in seen[-61:]]
        expected = engines
        if second >= 10 and min(up) > engines:
            expected = min(8, *up)
        elif second >= 60 and max(down) < engines:
            expected = max(1, *down)
        engines = autoscaler.wanted([load(requests[second])], engines)
        assert engines == expected
