"""The HTTP surface against scripted workers: answers, streams, errors."""

import json
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


@pytest.fixture
async def running(tmp_path: Path) -> AsyncGenerator[Running]:
    async with running_gateway(tmp_path) as running:
        yield running


@pytest.fixture
async def http(running: Running) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url, timeout=20) as client:
        yield client


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of a stream's events; ``[DONE]`` as it is."""
    async with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line]
    data = [line.removeprefix("data: ") for line in lines]
    return [json.loads(d) if d != "[DONE]" else d for d in data]


async def test_a_chat_is_answered(running: Running, http: httpx.AsyncClient) -> None:
    running.script.reused = 3
    response = await http.post(
        "/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-1"}
    )
    body = response.json()
    assert response.status_code == 200, body
    assert response.headers["x-request-id"] == "mine-1"
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"]["content"] == running.script.answer
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert body["usage"]["total_tokens"] == (
        body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    )
    cluster = running.cluster
    assert cluster.decodes[0].prompt_tokens == body["usage"]["prompt_tokens"]
    assert cluster.prefills[0].tokens == cluster.decodes[0].tokens
    await cluster.until(lambda: len(cluster.ended) == 1)
    assert cluster.ended[0].outcome == "finished"
    assert cluster.cancels == []


async def test_a_chat_streams(running: Running, http: httpx.AsyncClient) -> None:
    body = {**CHAT, "stream_options": {"include_usage": True}}
    *chunks, costs, done = await events(http, "/v1/chat/completions", body)
    assert done == "[DONE]"
    assert costs["choices"] == []
    assert costs["usage"]["completion_tokens"] > 5
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({(c["id"], c["created"], c["model"]) for c in [*chunks, costs]}) == 1
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert last == {
        "index": 0,
        "delta": {},
        "finish_reason": "stop",
        "logprobs": None,
    }
    assert all(c["finish_reason"] is None for c in [first, *middle])
    text = "".join(c["delta"]["content"] for c in middle)
    assert text == running.script.answer
    assert not any("�" in c["delta"]["content"] for c in middle)
