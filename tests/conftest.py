"""Fixtures that every kind of test shares."""

import logging
from collections.abc import Iterator

import pytest
import structlog


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say what may run side by side, for runs with several processes (xdist).

    The tests of a file share its fixtures. Those of the whole system share the machine:
    several systems at once would only wait for one another.
    """
    for item in items:
        whole = "e2e" in item.path.parts
        group = "e2e" if whole else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))


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
