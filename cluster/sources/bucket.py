"""Models in object storage, `s3://bucket/folder` and `gs://bucket/folder`, read through fsspec.

Credentials are the libraries' own affair: the node's environment, a mounted file that it names, or the role
of the machine.
"""

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from shoal.cluster.sources.checkpoint import ModelSourceError, ModelUnreachable, first_line
from shoal.cluster.sources.progress import Step

PIECE_BYTES = 16 << 20
NUM_STREAMS = 8
VERSIONS = ("ETag", "md5Hash", "generation")
"""What a store calls that which changes with an object's bytes: S3, then Google, which may have no hash."""

CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_SHARED_CREDENTIALS_FILE, or a machine's role",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or a machine's service account",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    path: str
    num_bytes: int
    version: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def digest_of(files: Sequence[StoredFile]) -> str:
    """Another if any of them was written since."""
    about = sorted((file.name, file.num_bytes, file.version) for file in files)
    return sha256(json.dumps(about).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Reads only. Raises ModelSourceError; ModelUnreachable for what may be mended without us."""

    scheme: str
    filesystem: Callable[[str], Any]
    """Of a scheme, by fsspec's interface."""

    @classmethod
    def of(cls, url: str) -> "Bucket":
        return cls(scheme=url.partition("://")[0], filesystem=_filesystem)

    def list(self, url: str) -> tuple[StoredFile, ...]:
        """The files of a folder, not of those within it; or the file itself."""
        try:
            fs = self.filesystem(self.scheme)
            fs.invalidate_cache()
            found = fs.ls(url, detail=True)
        except Exception as error:  # the library raises its own, its HTTP client's and the system's errors
            raise self._explained(error, url) from error
        return tuple(_stored_file(entry) for entry in found if entry["type"] == "file")

    def fetch(self, url: str, files: Sequence[StoredFile], folder: Path, step: Step) -> None:
        """Into an existing folder. Raises OSError for what is amiss with that."""
        fs = self.filesystem(self.scheme)
        step.add_total(sum(file.num_bytes for file in files))
        with ExitStack() as stack:
            written = [stack.enter_context((folder / file.name).open("wb")) for file in files]

            def copy(piece: tuple[int, int]) -> int:
                index, start = piece
                file = files[index]
                end = min(start + PIECE_BYTES, file.num_bytes)
                try:
                    content = fs.cat_file(file.path, start=start, end=end)
                except Exception as error:
                    raise self._explained(error, url) from error
                if len(content) != end - start:
                    raise ModelUnreachable(f"{url}: {file.name} was cut short on the way")
                os.pwrite(written[index].fileno(), content, start)
                return len(content)

            pieces = [(i, at) for i, file in enumerate(files) for at in range(0, file.num_bytes, PIECE_BYTES)]
            threads = stack.enter_context(ThreadPoolExecutor(NUM_STREAMS))
            for num_bytes in threads.map(copy, pieces):
                step.advance(num_bytes)

    def _explained(self, error: Exception, url: str) -> ModelSourceError:
        kind = type(error).__name__
        match error:
            case ImportError():
                return ModelSourceError(
                    f"{self.scheme}:// needs a library: pip install 'shoal[{self.scheme}]'"
                )
            case FileNotFoundError():
                return ModelSourceError(f"{url} does not exist: check the name of bucket and folder")
            case _ if isinstance(error, PermissionError) or getattr(error, "code", None) in (401, 403):
                why = "is refused to the credentials that this node has"
            case _ if "Credentials" in kind:
                why = "needs credentials, and this node has none"
            case _:
                return ModelUnreachable(f"{url} cannot be read: {first_line(error)}")
        return ModelSourceError(f"{url} {why}: give it {CREDENTIALS[self.scheme]}")


def _filesystem(scheme: str) -> Any:
    import fsspec  # noqa: PLC0415  (of an extra)

    return fsspec.filesystem(scheme)


def _stored_file(entry: dict[str, Any]) -> StoredFile:
    path = str(entry["name"])
    version = next((str(entry[key]) for key in VERSIONS if entry.get(key)), "")
    return StoredFile(path=path, num_bytes=int(entry["size"] or 0), version=version.strip('"'))
