"""Simulated nodes say nothing: what goes wrong is meant, and judged afterwards."""

import logging
from collections.abc import Generator

import pytest
import structlog


@pytest.fixture(autouse=True)
def _quiet() -> Generator[None]:
    quiet = structlog.make_filtering_bound_logger(logging.CRITICAL)
    structlog.configure(wrapper_class=quiet)
    yield
    structlog.reset_defaults()
