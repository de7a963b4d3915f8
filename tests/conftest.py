"""Fixtures that every kind of test shares."""

import logging
from collections.abc import Iterator

import pytest
import structlog


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
