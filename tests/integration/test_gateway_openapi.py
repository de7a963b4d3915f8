"""The OpenAPI document holds: whatever it allows gets an answer of a told shape."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.integration.gateway_cluster import MODEL, Running, Script, running_gateway

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
OPERATIONS = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/responses", "POST"),
    ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{name}", "GET"),
    ("/readyz", "GET"),
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def running(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncGenerator[Running]:
    folder: Path = tmp_path_factory.mktemp("openapi")
    script = Script(context=4096)
    async with running_gateway(folder, script=script) as running:
        yield running


def try_all(url: str, examples: int) -> None:
    """Ask all operations in every way that the document allows, and some that it doesn't."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for path, method in OPERATIONS:
        operation = schema[path][method]

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        )
        @given(case=operation.as_strategy())
        def holds(case: Any) -> None:
            if isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = MODEL
            case.call_and_validate(checks=CHECKS, timeout=20)

        holds()


@pytest.mark.parametrize(
    "examples",
    [
        3,
        pytest.param(200, marks=[pytest.mark.full, pytest.mark.timeout(600)]),
    ],
)
async def test_what_the_document_allows_is_answered_as_it_says(
    running: Running, examples: int
) -> None:
    await asyncio.to_thread(try_all, running.url, examples)
