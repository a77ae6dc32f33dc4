"""What drafts are worth: SmolLM2 copies a text, goes on with one, and chats, with and without them.

python -m tests.bench.drafts [--rounds 5] [--batches 1 8] [--tokens 200]

Two engines of one model, one of which drafts. Each task is given to both in turns, round after round, and
both must say the same; a round's ratio is of two turns that follow each other, and the median counts. Ends
with 1 if copying is not at least 1.8 times as fast at batch 1, or anything is below 0.95 of what it was.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.actors.engine.build import BuiltEngine, build_engine
from shoal.actors.engine.config import EngineConfig
from shoal.actors.ingress.protocol import ChatMessage
from shoal.actors.ingress.text import TextCodec
from shoal.actors.messages import EngineRequest, IngressId, RequestId, SamplingParams
from tests.checkpoints import smollm2

LEAST, LEAST_COPYING = 0.95, 1.8
BENCH = IngressId("bench")

TEXTS = (
    "The lighthouse at the end of the northern pier was built in 1874 by a company of masons from Leith. Its "
    "lamp burned oil until 1931, when the harbour board laid a cable along the sea wall. Keepers lived there "
    "with their families; the last of them, Agnes Murray, left in the spring of 1968 with two cats and a "
    "barometer. Since then a clock has lit the lamp each evening, and a man from the town climbs the stairs "
    "on the first Monday of every month to wipe the salt from the glass.",
    "def moving_average(values, width):\n    total = 0.0\n    result = []\n    for index, value in "
    "enumerate(values):\n        total += value\n        if index >= width:\n            total -= "
    "values[index - width]\n        if index >= width - 1:\n            result.append(total / width)\n    "
    "return result\n\n\ndef moving_maximum(values, width):\n    result = []\n    for index in "
    "range(len(values) - width + 1):\n        result.append(max(values[index:index + width]))\n    "
    "return result\n",
    "Bread needs four things: flour, water, salt and time. Mix 500 grams of flour with 350 of water and let "
    "them rest for half an hour before the salt goes in. Fold the dough every "
    "thirty minutes, four times in all, and leave it in a cool place over night. In the morning shape it, "
    "heat the oven as far as it goes, and bake it in a covered pot for twenty minutes and uncovered for "
    "twenty more. Wait until it is cold before you cut it.",
)
QUESTIONS = (
    "What is gravity?",
    "Give me three tips for sleeping better.",
    "Write a short story about a dog who learns to swim.",
    "Explain how a bicycle stays upright.",
    "What should I cook for dinner with rice, eggs and spinach?",
    "Who was Marie Curie, and why is she remembered?",
    "How do I ask my manager for a raise?",
    "Describe the difference between a virus and a bacterium.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    name: str
    prompts: tuple[tuple[int, ...], ...]
    """Of a batch, by turns."""
    temperature: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    answers: tuple[tuple[int, ...], ...]
    tokens_per_s: float
    """Behind everybody's first token."""


def tasks(codec: TextCodec) -> list[Task]:
    def chat(text: str) -> tuple[int, ...]:
        return codec.encode_chat(codec.render_chat([ChatMessage(role="user", content=text)]))

    def begun(text: str) -> tuple[int, ...]:
        """Said twice and begun a third time: so small a model does not do what it is asked, but it goes on
        with what it sees."""
        return codec.encode_prompt(f"{text}\n\n{text}\n\n{text[:40]}")

    chats = tuple(map(chat, QUESTIONS))
    return [
        Task(name="copies", prompts=tuple(map(begun, TEXTS))),
        Task(name="chats", prompts=chats),
        Task(name="chats at temperature 0.8", prompts=chats, temperature=0.8),
    ]


class Server:
    def __init__(self, built: BuiltEngine) -> None:
        self.built = built
        self._num_requests = 0

    def turn(self, task: Task, batch: int, round_: int, num_tokens: int) -> Turn:
        """The same requests for everybody who is asked for this round."""
        engine = self.built.engine
        names = [self._submit(task, i + round_ * batch, num_tokens) for i in range(batch)]
        answers: dict[str, list[int]] = defaultdict(list)
        began, at_first = 0.0, 0
        while engine.has_work:
            for reply in engine.step():
                assert reply.chunk.error is None, reply.chunk.error
                answers[reply.chunk.request_id] += reply.chunk.token_ids
            if not began and len(answers) == batch:
                began, at_first = time.perf_counter(), sum(map(len, answers.values()))
        took_s = time.perf_counter() - began
        num_drawn = sum(map(len, answers.values())) - at_first
        return Turn(answers=tuple(tuple(answers[name]) for name in names), tokens_per_s=num_drawn / took_s)

    def _submit(self, task: Task, index: int, num_tokens: int) -> RequestId:
        self._num_requests += 1
        name = RequestId(str(self._num_requests))
        request = EngineRequest(
            request_id=name,
            attempt=1,
            prompt_token_ids=task.prompts[index % len(task.prompts)],
            max_tokens=num_tokens,
            stop_token_ids=frozenset(),
            sampling=SamplingParams(temperature=task.temperature, seed=index),
        )
        replies = self.built.engine.submit([request], BENCH)
        assert not replies, replies
        return name


def server(num_draft_tokens: int, threads: int) -> Server:
    config = EngineConfig(
        checkpoint=str(smollm2()),
        max_model_len=2048,
        memory_bytes=2 << 30,
        threads=threads,
        prefix_cache="naive",
        speculative="ngram" if num_draft_tokens else None,
        num_draft_tokens=max(1, num_draft_tokens),
    )
    return Server(build_engine(config))


def compare(task: Task, batch: int, servers: Sequence[Server], args: argparse.Namespace) -> float:
    """The ratio of the second's speed to the first's."""
    drafter = servers[1].built.scheduler
    before = drafter.draft_counts()
    speeds: list[tuple[float, float]] = []
    for round_ in range(args.rounds):
        order = servers if round_ % 2 else servers[::-1]
        turns = {id(s): s.turn(task, batch, round_, args.tokens) for s in order}
        plain, drafted = (turns[id(s)] for s in servers)
        assert plain.answers == drafted.answers, "drafts change nothing"
        speeds.append((plain.tokens_per_s, drafted.tokens_per_s))
    ratio = statistics.median(drafted / plain for plain, drafted in speeds)
    after = drafter.draft_counts()
    plain_speed, drafted_speed = (statistics.median(each) for each in zip(*speeds, strict=True))
    num_right = after.num_accepted - before.num_accepted
    print(
        f"{task.name}, batch {batch}: {plain_speed:.1f} tokens/s, with drafts {drafted_speed:.1f}: "
        f"{ratio:.2f}x ({min(d / p for p, d in speeds):.2f} to {max(d / p for p, d in speeds):.2f}); "
        f"of {after.num_tokens - before.num_tokens} drafts {num_right} were right",
        flush=True,
    )
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    servers = [server(0, args.threads), server(args.drafts, args.threads)]
    is_as_wanted = True
    for task in tasks(TextCodec.load(smollm2())):
        for batch in args.batches:
            ratio = compare(task, batch, servers, args)
            least = LEAST_COPYING if task.name == "copies" and batch == 1 else LEAST
            is_as_wanted = is_as_wanted and ratio >= least
    return 0 if is_as_wanted else 1


if __name__ == "__main__":
    sys.exit(main())
