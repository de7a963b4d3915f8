"""Long prompts and many streams in one gateway process, with scripted workers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.gateway_cluster import MODEL, Running, Script, running_gateway

from kvtide.bus import BusLimits

ENVELOPE_BYTES = 4096
"""What is around a message's body."""
LATE_S = 5.0
"""Far more than a loop that is free takes, far less than a long prompt does."""


async def ask_long(running: Running, tokens: int) -> dict[str, Any]:
    """A completion of that many tokens, while the loop stays free for others."""
    prompt = [5 + i % 200 for i in range(tokens)]
    async with httpx.AsyncClient(base_url=running.url, timeout=100) as http:
        asked = asyncio.ensure_future(
            http.post("/v1/completions", json={"model": MODEL, "prompt": prompt})
        )
        while not asked.done():
            async with asyncio.timeout(LATE_S):
                assert (await http.get("/livez")).status_code == 200
        response = await asked
    assert response.status_code == 200, response.text
    work = running.cluster.decodes[-1]
    assert list(work.tokens) == prompt
    assert list(running.cluster.prefills[-1].tokens) == prompt
    assert len(work.keys) == tokens // 16
    inline = BusLimits().inline_bytes
    assert running.network.largest_bytes <= inline + ENVELOPE_BYTES
    return response.json()


@pytest.mark.parametrize(
    "tokens",
    [
        100_000,
        pytest.param(
            262_144, marks=[pytest.mark.full, pytest.mark.timeout(200)], id="256K"
        ),
    ],
)
async def test_long_prompts_go_as_blobs_and_the_bus_stays_small(
    tmp_path: Path, tokens: int
) -> None:
    script = Script(context=300_000)
    async with running_gateway(tmp_path, script=script) as running:
        reply = await ask_long(running, tokens)
    assert reply["choices"][0]["text"] == script.answer
    assert reply["usage"]["prompt_tokens"] == tokens


async def test_a_long_text_is_tokenised_beside_the_loop(tmp_path: Path) -> None:
    script = Script(context=300_000)
    text = "the quick brown fox " * 20_000
    async with (
        running_gateway(tmp_path, script=script) as running,
        httpx.AsyncClient(base_url=running.url, timeout=100) as http,
    ):
        before_s = asyncio.get_running_loop().time()
        asked = asyncio.ensure_future(http.post("/tokenize", json={"prompt": text}))
        answered = 0
        while not asked.done():
            assert (await http.get("/livez")).status_code == 200
            answered += 1
        tokens = (await asked).json()["tokens"]
        took_s = asyncio.get_running_loop().time() - before_s
        again = await http.post("/detokenize", json={"tokens": tokens})
    assert again.json()["prompt"] == text
    # others were served all the while
    assert answered >= min(5, took_s / LATE_S)


async def stream(running: Running, started: asyncio.Semaphore) -> str:
    """One stream on a connection of its own; ``started`` is released at its start."""
    reader, writer = await asyncio.open_connection(*running.address)
    body = json.dumps({"model": MODEL, "prompt": "x", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    try:
        await reader.readuntil(b"\r\n\r\n")
        started.release()
        data = await reader.readuntil(b"data: [DONE]\n\n")
    finally:
        writer.close()
    events = [line for line in data.split(b"\n") if line.startswith(b"data: {")]
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.mark.parametrize(
    "streams",
    [
        100,
        pytest.param(1000, marks=[pytest.mark.full, pytest.mark.timeout(200)]),
    ],
)
async def test_many_streams_are_open_at_once_and_all_are_whole(
    tmp_path: Path, streams: int
) -> None:
    script = Script(answer="a few words, an é and 🌊", hold_at=2)
    async with running_gateway(tmp_path, script=script) as running:
        started = asyncio.Semaphore(0)
        async with asyncio.timeout(150), asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(stream(running, started)) for _ in range(streams)
            ]
            for _ in range(streams):
                await started.acquire()
            assert running.cluster.running == streams
            script.go.set()
    assert {task.result() for task in asked} == {script.answer}
