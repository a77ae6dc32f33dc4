"""Models of a Hugging Face hub, kept in the hub library's own cache.

That keeps a list of all files of a commit before the first of them, a lock for each, and moves a file into
place when it is whole. So of a download that is killed nothing counts as there that is not, what is there is
not fetched again, and of many that want a file at once one fetches it. The token is the library's affair:
HF_TOKEN, or a file that HF_TOKEN_PATH names.
"""

import errno
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import httpx
from huggingface_hub import constants, get_cached_repo_tree, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import tqdm

from shoal.cluster.sources.checkpoint import (
    UNNEEDED_FILES,
    ModelSourceError,
    ModelUnreachable,
    Part,
    config_problems,
    find_problems,
    first_line,
    has_weights,
)
from shoal.cluster.sources.progress import Progress, Step

LOCAL_TROUBLES = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
"""Of a disk that is full, or may not be written."""

TOKEN = "HF_TOKEN, or HF_TOKEN_PATH to a file with one"


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

    def fetch(
        self,
        model: str,
        *,
        revision: str | None,
        progress: Progress,
        answer_within_s: float,
        part: Part = Part.WHOLE,
    ) -> Path:
        """The folder of a model's needed files, named by their commit: from the hub if it answers, else from
        its cache. A commit that is there is not asked for again."""
        if revision and (kept := self._kept(model, revision, part)):
            return kept
        reachable = not self.offline and self._answers(model, within_s=answer_within_s)
        try:
            # The configuration first: what cannot be served is refused before gigabytes of it are fetched.
            folder = self._snapshot(model, revision, ["config.json"], reachable=reachable, step=None)
            if not (problems := list(config_problems(folder))):
                with progress.step(f"fetching {model}") as step:
                    files = list(part.files)
                    folder = self._snapshot(model, folder.name, files, reachable=reachable, step=step)
                problems = find_problems(folder, part)
            if not problems and part is Part.TEXT and reachable:
                problems = self._weights_problems(model, folder.name)
        except Exception as error:  # the library raises its own, its HTTP client's and the system's errors
            raise self._explained(error, model, revision, reachable=reachable) from error
        if problems:
            raise ModelSourceError(*(f"{model}: {problem}" for problem in problems))
        return folder

    def _kept(self, model: str, revision: str, part: Part) -> Path | None:
        """What the cache has whole of a commit, which never changes."""
        if not re.fullmatch(r"[0-9a-f]{40}", revision):
            return None
        try:
            folder = self._snapshot(model, revision, list(part.files), reachable=False, step=None)
        except LocalEntryNotFoundError:
            return None
        return None if find_problems(folder, part) else folder

    def _weights_problems(self, model: str, commit: str) -> list[str]:
        """Whether there are any that can be served, as far as that can be said without them."""
        known = get_cached_repo_tree(model, revision=commit, cache_dir=self.cache_dir)
        if has_weights(file.path for file in known):
            return []
        return [f"{self.endpoint} has no safetensors weights of it: a safetensors checkpoint is needed"]

    def fetch_config(self, model: str, *, revision: str | None, answer_within_s: float) -> Path:
        """A folder that has at least the model's config.json: from the hub if it answers, else its cache."""
        reachable = not self.offline and self._answers(model, within_s=answer_within_s)
        try:
            folder = self._snapshot(model, revision, ["config.json"], reachable=reachable, step=None)
        except Exception as error:  # as above
            raise self._explained(error, model, revision, reachable=reachable) from error
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
                    ignore_patterns=list(UNNEEDED_FILES),
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

    def _explained(
        self, error: Exception, model: str, revision: str | None, *, reachable: bool
    ) -> ModelSourceError:
        kind = ModelSourceError
        match error:
            case GatedRepoError():
                why = f"is gated: accept its terms at {self.endpoint}/{model}, then set {TOKEN}"
            case RepositoryNotFoundError():
                why = f"is neither a directory here nor at {self.endpoint}; a private model needs {TOKEN}"
            case RevisionNotFoundError():
                why = f"has no revision {revision!r} at {self.endpoint}"
            case LocalEntryNotFoundError() if self.offline:
                why = "is not in the hub cache, and HF_HUB_OFFLINE is set: unset it, or name a directory"
            case LocalEntryNotFoundError() if not reachable:
                kind = ModelUnreachable
                why = f"is not in the hub cache, and {self.endpoint} does not answer: name a directory"
            case HfHubHTTPError() if error.response.status_code in (401, 403):
                why = f"is refused by {self.endpoint}: set {TOKEN} that may read it"
            case HfHubHTTPError():
                kind = ModelUnreachable
                why = f"cannot be had: {self.endpoint} answers with status {error.response.status_code}"
            case OSError() if error.errno in LOCAL_TROUBLES:
                cache = self.cache_dir or constants.HF_HUB_CACHE
                why = f"cannot be written to {cache} ({error.strerror}): free some space, or set HF_HOME"
            case _:
                kind = ModelUnreachable
                why = f"cannot be downloaded from {self.endpoint}: {first_line(error)}"
        return kind(f"{model} {why}")


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
