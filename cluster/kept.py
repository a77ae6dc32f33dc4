"""What a supervisor is told, as bytes for one that comes later: after a crash, or with another command.

That may run another version of the project, where fields are others, and a pickle's would be taken for those
of the same position. So the bytes begin with the shape of all that is in them, and another shape is refused.
"""

import pickle
from dataclasses import fields, is_dataclass
from functools import cache
from hashlib import sha256
from typing import Any, get_args

from shoal.cluster.supervisor import Wish

_TITLE = b"shoal wish "


class OtherVersion(ValueError):
    """A cluster that was begun by another version of the project; one line for the operator."""


def written(wish: Wish) -> bytes:
    return _head() + pickle.dumps(wish)


def read(data: bytes) -> Wish:
    """Raises OtherVersion."""
    if not data.startswith(_head()):
        raise OtherVersion(
            "the cluster was started by another version of Shoal than runs here: end it, and start it again"
        )
    wish: Wish = pickle.loads(data[len(_head()) :])
    return wish


@cache
def _head() -> bytes:
    return _TITLE + sha256(shape_of(Wish).encode()).hexdigest().encode() + b"\n"


def shape_of(kind: type) -> str:
    """Of a dataclass and of all that its fields may hold: names, types and order."""
    shapes: dict[str, str] = {}
    _describe(kind, shapes)
    return "\n".join(f"{name}: {shapes[name]}" for name in sorted(shapes))


def _describe(kind: Any, shapes: dict[str, str]) -> None:
    if is_dataclass(kind) and isinstance(kind, type):
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in shapes:
            return
        shapes[name] = ", ".join(f"{field.name}: {field.type}" for field in fields(kind))
        for field in fields(kind):
            _describe(field.type, shapes)
    for inner in get_args(kind):
        _describe(inner, shapes)
