"""What is done at a cluster's URL while it runs, and for which it was started."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from shoal.cluster.supervisor import ClusterStatus

Work = Callable[[str, threading.Event], None]
"""At this URL, until it is done or told to stop."""


@contextmanager
def beside(work: Work | None, stop: threading.Event) -> Iterator[Callable[[ClusterStatus], None]]:
    """Begins the work on a thread of its own; when it ends we are told to stop, and it ends before the block
    does. What it raised is raised then."""
    begun: list[Future[None]] = []
    with ThreadPoolExecutor(1, thread_name_prefix="work") as thread:

        def begin(status: ClusterStatus) -> None:
            if work is not None:
                ingress = status.ingresses[0]
                assert ingress is not None
                begun.append(thread.submit(work, ingress.url, stop))
                begun[0].add_done_callback(lambda _: stop.set())

        try:
            yield begin
        finally:
            stop.set()
    for done in begun:
        done.result()
