"""Targets and priority by header, and headers that say how an answer was made."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.gateway_cluster import MODEL, Running, running_gateway

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0,
}
ROUTE = "/v1/chat/completions"


@pytest.fixture
async def running(tmp_path: Path) -> AsyncGenerator[Running]:
    async with running_gateway(tmp_path) as running:
        yield running


@pytest.fixture
async def http(running: Running) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url, timeout=20) as client:
        yield client


async def test_targets_and_priority_reach_admission_and_workers(
    running: Running, http: httpx.AsyncClient
) -> None:
    wishes = {
        "x-kvtide-ttft-ms": "750",
        "x-kvtide-tbt-ms": "40.5",
        "x-kvtide-priority": "-3",
    }
    response = await http.post(ROUTE, json=CHAT, headers=wishes)
    assert response.status_code == 200, response.text
    admit = running.cluster.admits[-1]
    assert (admit.ttft_ms, admit.tbt_ms, admit.priority) == (750.0, 40.5, -3)
    assert running.cluster.decodes[-1].tbt_ms == 40.5

    # the body's own word is the client's
    await http.post(ROUTE, json={**CHAT, "priority": 7}, headers=wishes)
    assert running.cluster.admits[-1].priority == 7
    await http.post(ROUTE, json=CHAT)
    admit = running.cluster.admits[-1]
    assert (admit.ttft_ms, admit.tbt_ms, admit.priority) == (None, None, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-kvtide-ttft-ms", "soon"),
        ("x-kvtide-ttft-ms", "0"),
        ("x-kvtide-ttft-ms", "nan"),
        ("x-kvtide-tbt-ms", "-1"),
        ("x-kvtide-tbt-ms", "inf"),
        ("x-kvtide-priority", "1.5"),
        ("x-kvtide-priority", str(1 << 31)),
    ],
)
async def test_a_wrong_header_is_named(
    http: httpx.AsyncClient, name: str, value: str
) -> None:
    response = await http.post(ROUTE, json=CHAT, headers={name: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (name, "invalid_request_error")
    assert name in error["message"]


async def test_headers_say_how_it_was_made(
    running: Running, http: httpx.AsyncClient
) -> None:
    running.script.reused = 3
    debug = {"x-kvtide-debug": "1"}
    whole = await http.post(ROUTE, json=CHAT, headers=debug)
    assert whole.headers["x-kvtide-hit-tokens"] == "3"
    assert float(whole.headers["x-kvtide-queue-ms"]) >= 0
    streamed = await http.post(ROUTE, json={**CHAT, "stream": True}, headers=debug)
    assert streamed.headers["x-kvtide-decode"] == "decode-1"
    assert streamed.headers["x-kvtide-expected-hit-tokens"] == "0"
    assert float(streamed.headers["x-kvtide-expected-queue-ms"]) >= 0
    assert '"hit_tokens":3' in streamed.text
    plain = await http.post(ROUTE, json={**CHAT, "stream": True})
    assert not [name for name in plain.headers if name.startswith("x-kvtide")]


async def test_a_stream_says_how_far_its_prompt_is_when_asked(
    running: Running, http: httpx.AsyncClient
) -> None:
    running.script.hold_at, running.script.prefill_s = 0, 0.3
    body = {**CHAT, "stream": True}
    told: list[str] = []
    asked = {"x-kvtide-progress": "1"}
    async with http.stream("POST", ROUTE, json=body, headers=asked) as response:
        async for line in response.aiter_lines():
            if line.startswith(": kvtide"):
                told.append(line)
            if "stage=prefilled" in line:
                running.script.go.set()
    assert "choice=0 stage=prefill attempt=1 expected_hit_tokens=0" in told[0]
    assert "stage=prefilled queue_ms=0.0" in told[-1]
    plain = await http.post(ROUTE, json=body)
    assert ": kvtide" not in plain.text
