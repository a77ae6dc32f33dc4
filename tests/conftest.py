"""For all tests."""

import os
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's own threads spin, on cores that other tests want

settings.register_profile("shoal", deadline=None)  # a slow machine proves nothing wrong
settings.load_profile("shoal")

ONE_AFTER_THE_OTHER = "tests/oracle/"
"""A folder whose tests share what takes long to load, and want all cores."""


class ByModule(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """A module's tests run in one process, where they share its fixtures; so do those of one folder."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.split("::", maxsplit=1)[0]
        return ONE_AFTER_THE_OTHER if module.startswith(ONE_AFTER_THE_OTHER) else module


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByModule:
    return ByModule(config, log)
