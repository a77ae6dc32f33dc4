"""The same trace once for each policy, with a bar while it runs."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from shoal.actors.router.policies import RoutingPolicyName
from shoal.cluster.bench.trace.config import TraceConfig
from shoal.cluster.bench.trace.outcome import Outcome
from shoal.cluster.bench.trace.replay import Replay
from shoal.cluster.bench.trace.schedule import Event
from shoal.cluster.bench.trace.traces import TracedRequest


def replay_all(
    requests: Sequence[TracedRequest],
    config: TraceConfig,
    schedule: Sequence[Event],
    policies: Sequence[RoutingPolicyName],
    console: Console,
) -> list[Outcome]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    outcomes: list[Outcome] = []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        for policy in policies:
            task = bars.add_task(policy, total=len(requests))
            replay = Replay(requests, replace(config, policy=policy), schedule)
            outcomes.append(replay.run(partial(_show, bars, task)))
    return outcomes


def _show(bars: Progress, task: TaskID, num_served: int) -> None:
    bars.update(task, completed=num_served)
