"""Fixtures that every kind of test shares."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
