"""Deaths and shortages in the middle of saves and fetches: replies stay those of an engine without any cache,
and nothing is held afterwards. Stores and engines that can be held say when the middle is."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import pytest
import ray
from ray.exceptions import RayError

from shoal.actors.engine.build import build_engine
from shoal.actors.engine.config import EngineConfig
from shoal.actors.messages import CachedTokens, EngineId, IngressId, PrefixSource
from shoal.cluster.bench.two_nodes import actor_on, another_node
from shoal.kvstore.messages import StoreId
from tests.checkpoints import tiny_gemma3
from tests.cluster.served import wait_for
from tests.cluster.watched import Answer, Filler, HeldStore, WatchedEngine, request

BLOCK, NUM_BLOCKS = 16, 20
OBJECT_STORE = 120 << 20
BUDGET = 48 << 20
CALL_S = 60.0
FETCH_DEADLINE_S = 3.0

Prompt = int
"""The first token of one, and so a prefix of its own: all go on with the same."""

prompts = count(3)


def tokens(prompt: Prompt, num_blocks: int = NUM_BLOCKS) -> list[int]:
    """Some more than the blocks of its prefix hold."""
    return [prompt, *(3 + (i * i) % 500 for i in range(num_blocks * BLOCK + 4))]


WHOLE = NUM_BLOCKS * BLOCK


def get(reference: Any) -> Any:
    return ray.get(reference, timeout=CALL_S)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def engine_config(folder: Path) -> EngineConfig:
    """Rings beside paged layers, so that there are segments; heads so wide that extents are real objects."""
    return EngineConfig(
        checkpoint=str(tiny_gemma3(folder, head_dim=128)),
        max_model_len=512,
        memory_bytes=100 << 20,
        threads=1,
        block_size=BLOCK,
        max_num_seqs=4,
        max_num_batched_tokens=128,
    )


def without_cache(config: EngineConfig) -> "Alone":
    """What an engine without any cache answers."""
    engine = build_engine(replace(config, prefix_cache="naive")).engine

    def answer(prompt: Prompt, num_blocks: int = NUM_BLOCKS) -> Answer:
        replies = engine.submit([request("alone", tokens(prompt, num_blocks))], IngressId("alone"))
        while engine.has_work:
            replies += engine.step()
        return Answer.of([reply.chunk for reply in replies])

    return answer


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return engine_config(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def alone(config: EngineConfig) -> "Alone":
    return without_cache(config)


class Store:
    """On a node of its own engines. Named by all requests as one that has all of their prompts."""

    def __init__(self, name: str, actor: Any) -> None:
        self.store_id = StoreId(name)
        self.actor = actor

    def sources(self, num_blocks: int) -> tuple[PrefixSource, ...]:
        segments = tuple(range(num_blocks))
        return (PrefixSource(store_id=self.store_id, first=0, end=num_blocks, segments=segments),)

    def hold(self, point: str, let_pass: int = 0) -> None:
        get(self.actor.hold.remote(point, let_pass))

    def wait_until_held(self, *points: str) -> None:
        for point in points:
            get(self.actor.is_held.remote(point))

    def let_go(self, *points: str) -> None:
        for point in points:
            get(self.actor.let_go.remote(point))

    def is_left_alone(self) -> None:
        wait_for(
            lambda: get(self.actor.held.remote()) == {}, "no lease, and nothing that is coming", within_s=10
        )

    def kill(self) -> None:
        kill_actor(self.actor)


@dataclass
class Process:
    """An engine."""

    actor: Any

    def use(self, store: Store, *, own: bool) -> None:
        stores = {store.store_id: store.actor}
        get(self.actor.use_stores.remote(stores, store.store_id if own else None))

    def ask(self, prompt: Prompt, store: Store | None = None, num_blocks: int = NUM_BLOCKS) -> Any:
        sources = store.sources(num_blocks) if store else ()
        asked = request(f"request {next(prompts)}", tokens(prompt, num_blocks), sources)
        return self.actor.answer.remote(asked)

    def save(self, prompt: Prompt) -> None:
        get(self.ask(prompt))
        self.is_drained()

    def forget(self) -> None:
        get(self.actor.reset_prefix_cache.remote())

    def fallbacks(self) -> dict[str, int]:
        counts: dict[str, int] = get(self.actor.fallbacks.remote())
        return counts

    def is_drained(self, within_s: float = 20.0) -> None:
        held: dict[str, int] = {}

        def nothing_is_held() -> bool:
            held.clear()
            held.update(get(self.actor.held.remote()))
            return not held

        with suppress(AssertionError):
            wait_for(nothing_is_held, "nothing is held", within_s=within_s)
        assert held == {}

    def kill(self) -> None:
        kill_actor(self.actor)


def kill_actor(actor: Any) -> None:
    kill(get(actor.pid.remote()))
    wait_for(lambda: is_dead(actor), "its death is known")


def is_dead(actor: Any) -> bool:
    try:
        get(actor.pid.remote())
    except RayError:
        return True
    return False


@dataclass
class Nodes:
    """Prefixes are saved `there`, in a store of that node, and fetched `here`."""

    here: str
    there: str
    config: EngineConfig
    actors: list[Any] = field(default_factory=list)
    _writer: Process | None = None

    def start(self, node: str, actor_class: type, *args: Any) -> Any:
        self.actors.append(actor_on(node, actor_class, *args))
        return self.actors[-1]

    def store(self, name: str, *, writer: Process, reader: Process) -> Store:
        """To which the one saves, and from which the other fetches."""
        store = Store(name, self.start(self.there, HeldStore, StoreId(name), BUDGET))
        get(store.actor.start.remote())
        writer.use(store, own=True)
        reader.use(store, own=False)
        return store

    def engine(self, node: str) -> Process:
        name = EngineId(f"engine {len(self.actors)}")
        actor = self.start(node, WatchedEngine, name, self.config, FETCH_DEADLINE_S)
        assert get(actor.start.remote()).node == node
        return Process(actor)

    def living_writer(self) -> Process:
        if self._writer is None or is_dead(self._writer.actor):
            self._writer = self.engine(self.there)
        return self._writer


@pytest.fixture(scope="module")
def nodes(ray_address: str, config: EngineConfig) -> Iterator[Nodes]:
    with another_node(object_store_bytes=OBJECT_STORE) as there:
        nodes = Nodes(ray.get_runtime_context().get_node_id(), there, config)
        yield nodes
        for actor in nodes.actors:
            ray.kill(actor)


@pytest.fixture
def writer(nodes: Nodes) -> Process:
    return nodes.living_writer()


@pytest.fixture(scope="module")
def shared_reader(nodes: Nodes) -> Process:
    return nodes.engine(nodes.here)


@pytest.fixture
def reader(shared_reader: Process) -> Iterator[Process]:
    shared_reader.fallbacks()
    yield shared_reader
    shared_reader.is_drained()


class Alone(Protocol):
    def __call__(self, prompt: Prompt, num_blocks: int = NUM_BLOCKS) -> Answer: ...


def test_a_store_killed_while_it_takes_and_while_it_gives(
    nodes: Nodes, reader: Process, writer: Process, alone: Alone
) -> None:
    store = nodes.store("first", writer=writer, reader=reader)
    a, b = next(prompts), next(prompts)
    writer.save(a)
    store.hold("save", let_pass=1)
    assert get(writer.ask(b)) == alone(b), "no reply waits for what is being saved"
    store.hold("read")
    asked = reader.ask(a, store)
    store.wait_until_held("save", "read")
    store.kill()
    assert get(asked) == alone(a)
    assert get(reader.ask(b, store)) == alone(b)
    assert reader.fallbacks() == {"store_lost": 2}
    writer.is_drained()
    assert get(writer.actor.unsaved.remote())["store_lost"] > 0

    store = nodes.store("its successor", writer=writer, reader=reader)
    writer.save(a)
    reader.forget()
    answer = get(reader.ask(a, store))
    assert answer == alone(a)
    assert answer.cached == CachedTokens(other_store=WHOLE)
    reader.is_drained()
    store.is_left_alone()


def test_a_store_killed_between_its_answer_and_the_bytes(
    nodes: Nodes, reader: Process, writer: Process, alone: Alone
) -> None:
    store = nodes.store("answered", writer=writer, reader=reader)
    a = next(prompts)
    writer.save(a)
    get(reader.actor.hold_transfer.remote())
    asked = reader.ask(a, store)
    get(reader.actor.transfer_is_held.remote())
    store.kill()
    get(reader.actor.let_transfer_go.remote())
    assert get(asked) == alone(a)
    assert reader.fallbacks() == {"store_lost": 1}


@pytest.mark.parametrize("where", ["store", "bytes"])
def test_a_request_given_up_while_its_prefix_is_fetched_leaves_nothing_behind(
    nodes: Nodes, reader: Process, writer: Process, where: str
) -> None:
    """As at its deadline, or when its client goes: before the store answers, or before the bytes came."""
    store = nodes.store(f"left at the {where}", writer=writer, reader=reader)
    a = next(prompts)
    writer.save(a)
    asked = request(f"left at the {where}", tokens(a), store.sources(NUM_BLOCKS))
    hold, is_held, let_go = {
        "store": (store.actor.hold, store.actor.is_held, store.actor.let_go),
        "bytes": (reader.actor.hold_transfer, reader.actor.transfer_is_held, reader.actor.let_transfer_go),
    }[where]
    point = ("read",) if where == "store" else ()
    get(hold.remote(*point))
    get(reader.actor.submit.remote(IngressId("left"), (asked,)))
    get(is_held.remote(*point))
    get(reader.actor.abort.remote(asked.request_id, asked.attempt, None))
    get(let_go.remote(*point))
    reader.is_drained()
    store.is_left_alone()


def test_an_engine_killed_while_it_is_saved_from_and_while_its_prefix_is_fetched(
    nodes: Nodes, reader: Process, writer: Process, alone: Alone
) -> None:
    store = nodes.store("survivor", writer=writer, reader=reader)
    a, b = next(prompts), next(prompts)
    writer.save(a)
    store.hold("save", let_pass=1)
    get(writer.ask(b))
    store.hold("read")
    asked = reader.ask(a, store)
    store.wait_until_held("save", "read")
    writer.kill()
    store.let_go("save", "read")
    answer = get(asked)
    assert answer == alone(a)
    assert answer.cached == CachedTokens(other_store=WHOLE), "what was saved is not the engine's any more"
    assert reader.fallbacks() == {}
    store.is_left_alone()
    reader.is_drained()
    answer = get(reader.ask(b, store))
    assert answer == alone(b)
    assert answer.cached.total < WHOLE
    assert reader.fallbacks() == {"missing": 1}
    store.is_left_alone()


def test_another_job_fills_the_object_stores(
    nodes: Nodes, reader: Process, writer: Process, alone: Alone
) -> None:
    store = nodes.store("crowded", writer=writer, reader=reader)
    a, b = next(prompts), next(prompts)
    fillers = [nodes.start(nodes.there, Filler), nodes.start(nodes.here, Filler)]
    get(fillers[0].fill.remote(OBJECT_STORE, 4 << 20))
    writer.save(a)
    get(fillers[1].fill.remote(200 << 20, 4 << 20))
    assert get(reader.ask(a, store)) == alone(a)
    assert sum(reader.fallbacks().values()) <= 1
    reader.is_drained()
    store.is_left_alone()
    for filler in fillers:
        get(filler.empty.remote())
    writer.save(b)
    answer = get(reader.ask(b, store))
    assert answer == alone(b)
    assert answer.cached == CachedTokens(other_store=WHOLE)


def test_every_cut_is_the_same_from_another_node(
    nodes: Nodes, reader: Process, writer: Process, alone: Alone
) -> None:
    """Tokens, and their log-probabilities to the bit."""
    store = nodes.store("whole", writer=writer, reader=reader)
    a = next(prompts)
    writer.save(a)
    for num_blocks in range(1, NUM_BLOCKS + 1):
        reader.forget()
        answer = get(reader.ask(a, store, num_blocks))
        assert answer == alone(a, num_blocks)
        assert answer.cached == CachedTokens(other_store=num_blocks * BLOCK)
    store.is_left_alone()


def test_a_node_killed_while_its_store_gives(
    nodes: Nodes, reader: Process, writer: Process, alone: Alone
) -> None:
    store = nodes.store("lost", writer=writer, reader=reader)
    a, b, c = next(prompts), next(prompts), next(prompts)
    for prompt in (a, b):
        writer.save(prompt)
    get(reader.actor.hold_transfer.remote())
    answered = reader.ask(a, store)
    get(reader.actor.transfer_is_held.remote())
    store.hold("read")
    asked = reader.ask(b, store)
    store.hold("save")
    get(writer.ask(c))
    store.wait_until_held("read", "save")
    kill(get(store.actor.raylet_pid.remote()))
    get(reader.actor.let_transfer_go.remote())
    assert get(asked) == alone(b)
    assert get(answered) == alone(a)
    assert get(reader.ask(c, store)) == alone(c)
    assert set(reader.fallbacks()) <= {"store_lost", "deadline"}
