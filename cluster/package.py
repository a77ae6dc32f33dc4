"""What a process can tell of the package that Ray made of a submitter's directory."""

from pathlib import Path

_UNPACKED = "working_dir_files"
"""Ray unpacks them below a folder of this name."""


def hint_in_a_package() -> str:
    """Why a file may be missing here, for the end of an error; empty outside of a Ray job's package."""
    if _UNPACKED not in Path.cwd().parts:
        return ""
    return (
        "; here is a Ray job's package, without what .gitignore and .rayignore name: name a path that every "
        "node has, or submit with RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1"
    )
