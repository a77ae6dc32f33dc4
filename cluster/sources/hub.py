"""Models of a Hugging Face hub, kept in the hub library's own cache."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import httpx
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import tqdm

from shoal.cluster.sources.checkpoint import ModelSourceError, config_problems, find_problems
from shoal.cluster.sources.progress import Progress, Step

NEEDED_FILES = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
]
UNNEEDED_FILES = ["*/*", "consolidated*"]
"""Other formats of the same weights, which some models keep in subfolders or beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    endpoint: str
    offline: bool = False
    cache_dir: Path | None = None
    """None is the hub library's own choice."""

    @classmethod
    def from_environment(cls) -> "Hub":
        # Read now rather than taken from the library, which read it when it was imported.
        endpoint = os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")
        return cls(endpoint=endpoint, offline=constants.HF_HUB_OFFLINE)

    def fetch(self, model: str, *, revision: str | None, progress: Progress, answer_within_s: float) -> Path:
        """The folder of a model's needed files: from the hub if it answers, else from its cache."""
        reachable = not self.offline and self._answers(model, within_s=answer_within_s)
        try:
            # The configuration first: what cannot be served is refused before gigabytes of it are fetched.
            folder = self._snapshot(model, revision, ["config.json"], reachable=reachable, step=None)
            if not (problems := list(config_problems(folder))):
                with progress.step(f"fetching {model}") as step:
                    folder = self._snapshot(model, folder.name, NEEDED_FILES, reachable=reachable, step=step)
                problems = find_problems(folder)
        except Exception as error:  # the library raises its own, its HTTP client's and the system's errors
            raise ModelSourceError(self._explain(error, model, revision, reachable=reachable)) from error
        if problems:
            raise ModelSourceError(*(f"{model}: {problem}" for problem in problems))
        return folder

    def fetch_config(self, model: str, *, revision: str | None, answer_within_s: float) -> Path:
        """A folder that has at least the model's config.json: from the hub if it answers, else its cache."""
        reachable = not self.offline and self._answers(model, within_s=answer_within_s)
        try:
            folder = self._snapshot(model, revision, ["config.json"], reachable=reachable, step=None)
        except Exception as error:  # as above
            raise ModelSourceError(self._explain(error, model, revision, reachable=reachable)) from error
        if not (folder / "config.json").is_file():
            raise ModelSourceError(f"{model}: has no config.json")
        return folder

    def _snapshot(
        self, model: str, revision: str | None, files: list[str], *, reachable: bool, step: Step | None
    ) -> Path:
        verbosity = hub_logging.get_verbosity()
        hub_logging.set_verbosity(logging.ERROR)
        try:
            return Path(
                snapshot_download(
                    model,
                    revision=revision,
                    endpoint=self.endpoint,
                    cache_dir=self.cache_dir,
                    local_files_only=not reachable,
                    allow_patterns=files,
                    ignore_patterns=UNNEEDED_FILES,
                    tqdm_class=_bar_class(step),
                )
            )
        finally:
            hub_logging.set_verbosity(verbosity)

    def _answers(self, model: str, *, within_s: float) -> bool:
        """Whether the hub says anything in time; a stuck name lookup can only be left to its thread."""
        answer: SimpleQueue[bool] = SimpleQueue()
        url = f"{self.endpoint}/api/models/{model}"
        Thread(target=lambda: answer.put(_responds(url, within_s)), daemon=True).start()
        try:
            return answer.get(timeout=within_s)
        except Empty:
            return False

    def _explain(self, error: Exception, model: str, revision: str | None, *, reachable: bool) -> str:
        match error:
            case GatedRepoError():
                why = f"is gated: accept its terms at {self.endpoint}/{model}, then set HF_TOKEN"
            case RepositoryNotFoundError():
                why = f"is neither a directory here nor at {self.endpoint}; a private model needs HF_TOKEN"
            case RevisionNotFoundError():
                why = f"has no revision {revision!r} at {self.endpoint}"
            case LocalEntryNotFoundError() if self.offline:
                why = "is not in the hub cache, and HF_HUB_OFFLINE is set: unset it, or name a directory"
            case LocalEntryNotFoundError() if not reachable:
                why = f"is not in the hub cache, and {self.endpoint} does not answer: name a directory"
            case HfHubHTTPError():
                why = f"cannot be had: {self.endpoint} answers with status {error.response.status_code}"
            case _:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                why = f"cannot be downloaded from {self.endpoint}: {reason}"
        return f"{model} {why}"


def _responds(url: str, timeout_s: float) -> bool:
    try:
        return httpx.get(url, timeout=timeout_s).status_code < 500
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError):
        return False


def _bar_class(step: Step | None) -> type[tqdm]:
    """The hub library reports progress to a tqdm class; this one draws nothing and tells `step`."""

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Of the library's bars, only this one counts bytes that have arrived on disk.
            self._counts = kwargs.get("name") == "huggingface_hub.snapshot_download"
            self._known_total = 0
            super().__init__(*args, **kwargs | {"disable": True})  # type: ignore[no-untyped-call]

        def refresh(self, *args: Any, **kwargs: Any) -> None:
            total = int(self.total or 0)
            if step is not None and self._counts and total > self._known_total:
                step.add_total(total - self._known_total)
                self._known_total = total

        def update(self, n: float | None = 1) -> bool | None:
            if step is not None and self._counts:
                step.advance(int(n or 0))
            return None

    return Bar
