"""What every node is told of a model: where it is, and exactly which bytes of what is there.

A line that a person can read: `hf://org/name@COMMIT`, `s3://bucket/folder@DIGEST`, `/models/x.gguf@SHA256`,
`pypi://requirement@SHA256`; or a directory, which is taken as it is on each node.
"""

import re
from dataclasses import dataclass

from shoal.cluster.sources.checkpoint import ModelSourceError

HUB, INDEX = "hf", "pypi"
BUCKETS = ("s3", "gs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    scheme: str
    """Empty for a file on the node."""
    location: str
    pin: str

    def __str__(self) -> str:
        return f"{self.url}@{self.pin}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.location}" if self.scheme else self.location

    @property
    def cache_name(self) -> str:
        """Of what is made of it here: for people, and for a folder's name."""
        slug = re.sub(r"[^\w.-]+", "-", f"{self.scheme}-{self.location}").strip("-.")
        return f"{slug[-80:]}-{self.pin[:16]}"


def is_pinned(source: str) -> bool:
    return re.search(r"(?:://.+|\.gguf)@[0-9a-f]{16,}$", source) is not None


def parse(source: str) -> Pinned:
    if not is_pinned(source):
        raise ModelSourceError(f"{source} does not say which bytes are meant")
    where, _, pin = source.rpartition("@")
    scheme, found, location = where.partition("://")
    return (
        Pinned(scheme=scheme, location=location, pin=pin)
        if found
        else Pinned(scheme="", location=where, pin=pin)
    )


def is_in_bucket(model: str) -> bool:
    return model.startswith(tuple(f"{scheme}://" for scheme in BUCKETS))
