"""Fixtures that every kind of test shares."""

import logging
from collections.abc import Iterator

import pytest
import structlog
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling


class SideBySide(LoadScopeScheduling):
    """What may run side by side, for runs with several processes (xdist).

    The tests of a file share its fixtures. Those of the whole system share the machine:
    several systems at once would only wait for one another.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "e2e" if "e2e" in file.split("/") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> SideBySide:
    """Of each run with several processes."""
    return SideBySide(config, log)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Commands that run within a test set logging up for their process: undone here."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
