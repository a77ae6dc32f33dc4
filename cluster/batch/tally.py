"""What has become of a batch so far."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from shoal.cluster.batch.lines import Problem, Reply, is_good

PLACES = ("device", "own_store", "other_store")


@dataclass(slots=True)
class Tally:
    """Lines of the whole batch; tokens and time of this run."""

    num_lines: int
    num_before: int = 0
    """Answered by earlier runs,"""
    num_failed_before: int = 0
    """and those of them that are no 200."""
    num_answered: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cached_tokens_by_place: Counter[str] = field(default_factory=Counter)
    """Of a server that tells (Shoal's)."""
    errors: Counter[str] = field(default_factory=Counter)
    """Failed lines of this run, by code."""

    @property
    def done(self) -> int:
        return self.num_before + self.num_answered

    @property
    def failed(self) -> int:
        return self.num_failed_before + self.num_failed

    @property
    def left(self) -> int:
        return self.num_lines - self.done

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def count(self, outcome: Reply | Problem) -> None:
        self.num_answered += 1
        if is_good(outcome):
            assert isinstance(outcome, Reply)
            self._count_usage(_object(outcome.body.get("usage")))
        else:
            self.num_failed += 1
            self.errors[code_of(outcome)] += 1

    def _count_usage(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens += _number(usage.get("prompt_tokens"))
        self.completion_tokens += _number(usage.get("completion_tokens"))
        details = _object(usage.get("prompt_tokens_details"))
        self.cached_tokens += _number(details.get("cached_tokens"))
        places = _object(usage.get("cached_tokens_by_place"))
        self.cached_tokens_by_place.update({place: _number(places.get(place)) for place in PLACES})

    def summary(self, took_s: float) -> dict[str, Any]:
        return {
            "lines": self.num_lines,
            "answered": self.done - self.failed,
            "failed": self.failed,
            "unanswered": self.left,
            "answered_before": self.num_before,
            "errors": dict(self.errors),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "cached_tokens_by_place": dict(self.cached_tokens_by_place),
            "seconds": round(took_s, 3),
            "tokens_per_s": round(self.tokens / took_s, 1) if took_s > 0 else 0.0,
        }


def in_a_line(tally: Tally, took_s: float) -> str:
    """All that a person must know at the end."""
    parts = [f"{tally.num_lines:,} lines: {tally.done - tally.failed:,} answered, {tally.failed:,} failed"]
    if tally.errors:
        parts[0] += f" ({', '.join(f'{code} {n:,}' for code, n in tally.errors.most_common(5))})"
    if tally.left:
        parts.append(f"{tally.left:,} not asked or not answered: run again to go on")
    if tally.num_answered:
        parts.append(
            f"{tally.num_answered:,} now, in {took_s:,.1f} s, with {tally.prompt_tokens:,} tokens of prompts"
            f" ({tally.cached_tokens:,} of them hit) and {tally.completion_tokens:,} of answers"
        )
    return "; ".join(parts)


def code_of(outcome: Reply | Problem) -> str:
    """What went wrong, in a word."""
    if isinstance(outcome, Problem):
        return outcome.code
    return str(_object(outcome.body.get("error")).get("code") or f"http_{outcome.status}")


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0
