"""Clients that stop reading, and too many of them: over real TCP."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.gateway_cluster import MODEL, Running, Script, running_gateway

from kvtide.bus.messages import Outcome
from kvtide.kv import Role

LONG = " ".join(f"w{i}" for i in range(400))
TOKENS = 450
STALL_S = 1.0


def body(*, stream: bool) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi", "n": 4, "stream": stream}


@asynccontextmanager
async def narrow_connection(running: Running) -> AsyncGenerator[socket.socket]:
    """A connection on which little is under way at a time, so that it soon is full."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        client.setblocking(False)
        await loop.sock_connect(client, running.address)
        yield client


async def send(client: socket.socket, data: dict[str, Any]) -> None:
    content = json.dumps(data).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}"
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(client, head.encode() + b"\r\n\r\n" + content)


async def receive_all(client: socket.socket, *, pause_s: float = 0.0) -> bytes:
    """All until the last event or the end of the connection, a piece at a time."""
    loop = asyncio.get_running_loop()
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := await loop.sock_recv(client, 4096):
            received += data
            if b"[DONE]" in received[-100:]:
                break
            await asyncio.sleep(pause_s)
    return received


@pytest.fixture
async def running(tmp_path: Path) -> AsyncGenerator[Running]:
    script = Script(answer=LONG)
    async with running_gateway(
        tmp_path, script=script, client_stall_s=STALL_S, max_connections=3
    ) as running:
        yield running


async def test_a_client_that_stops_reading_is_cut_off_and_every_stage_cancelled(
    running: Running,
) -> None:
    running.script.hold_at = TOKENS
    async with narrow_connection(running) as client:
        await send(client, body(stream=True))
        await running.cluster.until(lambda: running.cluster.steps == 4 * TOKENS)
        assert running.cluster.ended == []
        await running.cluster.until(lambda: len(running.cluster.ended) == 4)
        outcomes = {ended.outcome for ended in running.cluster.ended}
        assert outcomes == {Outcome.CANCELLED}
        await running.cluster.until(lambda: running.cluster.running == 0)
        cancelled = {role for role, _ in running.cluster.cancels}
        assert Role.DECODE in cancelled
        async with asyncio.timeout(40):
            received = await receive_all(client)
    assert b"data: " in received
    assert b"[DONE]" not in received


async def test_a_slow_client_gets_all_though_it_takes_longer_than_the_limit(
    running: Running,
) -> None:
    async with narrow_connection(running) as client:
        await send(client, body(stream=True))
        clock = running.cluster.clock
        start_s = clock.monotonic()
        async with asyncio.timeout(40):
            received = await receive_all(client, pause_s=0.03)
    assert clock.monotonic() - start_s > STALL_S
    assert received.count(b'"finish_reason":"length"') == 4
    assert b"[DONE]" in received


async def test_connections_over_the_limit_are_refused_and_later_ones_served(
    running: Running,
) -> None:
    limit = 3
    async with httpx.AsyncClient(base_url=running.url, timeout=20) as http:
        opened = [await asyncio.open_connection(*running.address) for _ in range(limit)]
        reader, writer = await asyncio.open_connection(*running.address)
        async with asyncio.timeout(40):
            refused = await reader.read()
        assert refused.startswith(b"HTTP/1.1 503 ")
        error = json.loads(refused.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "server_is_overloaded"
        assert b"retry-after-ms: 1000" in refused
        for _, each in [*opened, (reader, writer)]:
            each.close()
            await each.wait_closed()

        async def is_served() -> bool:
            try:
                return (await http.get("/livez")).status_code == 200
            except httpx.TransportError:
                return False

        async with asyncio.timeout(40):
            while not await is_served():
                pass
