"""`GET /debug/invariants`: is everything returned that was given out? When nothing is asked, it must be."""

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

from shoal.actors.ingress.errors import no_answer
from shoal.kvstore.outstanding import Outstanding


def invariants(processes: Mapping[str, Outstanding | None]) -> JSONResponse:
    """200 with `clean`, also while requests run and it is false; 503 where a process did not answer."""
    silent = [name for name, outstanding in processes.items() if outstanding is None]
    said = {
        "clean": all(outstanding is not None and outstanding.is_clean for outstanding in processes.values()),
        "processes": {name: _entry(outstanding) for name, outstanding in processes.items()},
    }
    if not silent:
        return JSONResponse(said)
    error = no_answer(silent)
    return JSONResponse({**error.body, **said}, error.status, headers=error.headers)


def _entry(outstanding: Outstanding | None) -> dict[str, Any]:
    if outstanding is None:
        return {"clean": False, "answered": False}
    entry = {"clean": outstanding.is_clean, "answered": True, "outstanding": dict(outstanding.counts)}
    return entry | ({"broken": outstanding.broken} if outstanding.broken else {})
