"""Streamed completions of many kinds, and all that is heard of one."""

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

Body = dict[str, Any]

SILENCE_S = 120.0
"""A stream that says nothing for so long, not even that it waits, has been forgotten."""

KINDS = (
    "greedy",
    "seeded",
    "penalties",
    "stop string",
    "logprobs",
    "several",
    "choices",
    "stop tokens",
    "echo",
)
VOCABULARY = 500


@dataclass(frozen=True, kw_only=True)
class Said:
    """Of one request; what is cached differs from run to run."""

    texts: dict[int, str]
    logprobs: dict[int, tuple[tuple[str, float | None], ...]]
    """(token, its logprob), by choice."""
    reasons: dict[int, tuple[str, ...]]
    """Each choice has exactly one."""
    prompt_tokens: int
    completion_tokens: int
    placement: str = field(compare=False)


class Cut(Exception):
    """A stream that did not come to its end: an error event, a status, or no [DONE]."""


def spoken(url: str, body: Body) -> Said:
    """One request to its end. Raises Cut or httpx.TransportError."""
    return heard(events(url, body))


def events(url: str, body: Body) -> Iterator[httpx.Headers | Body]:
    """The headers, then each event; [DONE] is checked and left out."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=SILENCE_S) as response:
        if response.status_code != 200:
            raise Cut(f"{response.status_code} {response.read().decode()}")
        yield response.headers
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                event: Body = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise Cut(line)
                yield event
    raise Cut("no [DONE]")


def heard(events: Iterator[httpx.Headers | Body]) -> Said:
    texts: defaultdict[int, str] = defaultdict(str)
    logprobs: defaultdict[int, list[tuple[str, float | None]]] = defaultdict(list)
    reasons: defaultdict[int, list[str]] = defaultdict(list)
    usage: Body = {}
    placement = ""
    for event in events:
        if isinstance(event, httpx.Headers):
            placement = event["x-shoal-placement"]
            continue
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            index = choice["index"]
            texts[index] += choice["text"]
            if said := choice["logprobs"]:
                logprobs[index] += zip(said["tokens"], said["token_logprobs"], strict=True)
            if reason := choice["finish_reason"]:
                reasons[index].append(reason)
    return Said(
        texts=dict(texts),
        logprobs={index: tuple(said) for index, said in logprobs.items()},
        reasons={index: tuple(said) for index, said in reasons.items()},
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        placement=placement,
    )


def bodies(url: str, count: int, max_tokens: int, *, seed: int = 0) -> list[Body]:
    """Of every kind in turn; some share a prefix of some blocks."""
    prompts = _Prompts(random.Random(seed))
    return [_body(url, KINDS[i % len(KINDS)], i, prompts, max_tokens) for i in range(count)]


class _Prompts:
    def __init__(self, choose: random.Random) -> None:
        self._choose = choose
        self._prefixes = [self._tokens(80) for _ in range(3)]

    def one(self) -> list[int]:
        own = self._tokens(self._choose.randrange(5, 60))
        return own if self._choose.random() < 0.3 else [*self._choose.choice(self._prefixes), *own]

    def _tokens(self, count: int) -> list[int]:
        return [self._choose.randrange(3, VOCABULARY) for _ in range(count)]


def _body(url: str, kind: str, seed: int, prompts: _Prompts, max_tokens: int) -> Body:
    body: Body = {"prompt": prompts.one(), "max_tokens": max_tokens, "ignore_eos": True}
    greedy, seeded = body | {"temperature": 0}, body | {"temperature": 1.0, "seed": seed}
    if kind == "stop string":
        text = spoken(url, greedy).texts[0]
        return greedy | {"stop": [text[len(text) * 2 // 3 :][:4]]}
    of_kind: dict[str, Body] = {
        "greedy": greedy,
        "seeded": seeded | {"top_p": 0.95},
        "penalties": seeded | {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
        "logprobs": seeded | {"logprobs": 2},
        "several": seeded | {"prompt": [prompts.one(), prompts.one()]},
        "choices": seeded | {"n": 3, "logprobs": 0},
        "stop tokens": seeded
        | {"stop_token_ids": list(range(3, VOCABULARY, 8)), "min_tokens": max_tokens * 2 // 3},
        "echo": seeded | {"logprobs": 1, "echo": True},
    }
    return of_kind[kind]
