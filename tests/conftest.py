"""Fixtures that every kind of test shares."""

import logging
from collections.abc import Iterator

import pytest
import structlog
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

_ANSWERS = ("test_e2e_oracle.py", "test_engine_demo_model.py")


class SideBySide(LoadScopeScheduling):
    """What may run side by side, for runs with several processes (xdist).

    The tests of a file share its fixtures. Those of the whole system share the machine,
    as many at once would only wait for one another: those that compare answers with the
    oracle's are one half of them, all others, with the faults, the other.
    """

    def _split_scope(self, nodeid: str) -> str:
        folder, _, file = nodeid.partition("::")[0].rpartition("/")
        if folder.endswith("e2e"):
            return "answers" if file in _ANSWERS else "systems"
        return f"{folder}/{file}"


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
    _plain_logs()


def _plain_logs() -> None:
    """The default draws tracebacks with all locals: seconds in which no beat is sent."""
    structlog.reset_defaults()
    renderer = structlog.dev.ConsoleRenderer(
        colors=False, exception_formatter=structlog.dev.plain_traceback
    )
    *others, _ = structlog.get_config()["processors"]
    structlog.configure(processors=[*others, renderer])


_plain_logs()
