"""Imports point one way, and the plain rooms stay plain (DESIGN, "The rooms")."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("cluster", "actors", "kvstore", "kernels", "configs")

MAY_IMPORT = {
    "shoal.cluster": {"shoal.cluster", "shoal.actors", "shoal.kvstore", "shoal.configs"},
    "shoal.actors": {"shoal.actors", "shoal.kvstore"},
    "shoal.kvstore": {"shoal.kvstore"},
    "shoal.kernels": {"shoal.kernels"},
    "shoal.configs": {"shoal.configs"},
}
"""By prefix; the longest one that fits decides."""

TORCH_HALF = (
    "shoal.actors.engine.build",
    "shoal.actors.engine.device_memory",
    "shoal.actors.engine.runner",
    "shoal.actors.engine.sampler",
    "shoal.actors.engine.models",
)
BENCH = "shoal.cluster.bench"
"""The engine's torch half, and the benchmark that drives it, see kernels."""

MAY_USE_RAY = (
    "shoal.actors.engine.actor",
    "shoal.actors.engine.offers",
    "shoal.actors.ingress.actor",
    "shoal.actors.ingress.links",
    "shoal.actors.ingress.placer",
    "shoal.actors.ingress.remote_cluster",
    "shoal.actors.ingress.stores",
    "shoal.actors.ingress.streams",
    "shoal.actors.router.actor",
    "shoal.cluster.bench.bytes_engine",
    "shoal.cluster.bench.decode_beside_saving",
    "shoal.cluster.bench.engine_stream",
    "shoal.cluster.bench.instant_engine",
    "shoal.cluster.bench.reuse_nodes",
    "shoal.cluster.bench.store",
    "shoal.cluster.bench.two_nodes",
    "shoal.kvstore.actor",
    "shoal.kvstore.metrics",
    "shoal.kvstore.object_store",
    "shoal.kvstore.reporter",
    "shoal.cluster.connection",
    "shoal.cluster.driver",
    "shoal.cluster.launcher",
    "shoal.cluster.lifecycle",
    "shoal.cluster.serve",
    "shoal.cluster.supervisor_actor",
)


def modules() -> dict[str, Path]:
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    return {_name(path): path for path in paths}


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("shoal", *parts)).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def within(name: str, prefixes: tuple[str, ...] | set[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


ALL = sorted(modules().items())


def test_there_is_something_to_check() -> None:
    assert len(ALL) > 30


@pytest.mark.parametrize(("name", "path"), ALL, ids=[name for name, _ in ALL])
def test_imports_point_one_way(name: str, path: Path) -> None:
    room = ".".join(name.split(".")[:2])
    allowed = set(MAY_IMPORT.get(room, set()))
    if within(name, (*TORCH_HALF, BENCH)):
        allowed.add("shoal.kernels")
    for imported in imports(path):
        if within(imported, {"shoal"}):
            assert within(imported, allowed), f"{name} must not import {imported}"
        if within(imported, {"ray"}):
            assert within(name, MAY_USE_RAY), f"{name} is plain: it must not import ray"
        if within(imported, {"torch"}) and room in ("shoal.actors", "shoal.kvstore"):
            assert within(name, TORCH_HALF), f"{name} is plain: it must not import torch"


@pytest.mark.parametrize("room", ["ingress", "router", "engine"])
def test_the_rooms_of_actors_meet_only_in_messages(room: str) -> None:
    others = {f"shoal.actors.{other}" for other in ("ingress", "router", "engine") if other != room}
    for name, path in ALL:
        if within(name, {f"shoal.actors.{room}"}):
            assert not [found for found in imports(path) if within(found, others)], name


def test_kernels_is_a_namespace() -> None:
    """Transformers would take a regular package called `kernels` for the one of that name on PyPI."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_the_top_level_is_the_one_of_the_design() -> None:
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert rooms - {"build", "dist", "shoal.egg-info"} == {*ROOMS, "tests"}
