"""Clients that leave, workers that die, gateways that end: over real TCP."""

# pyright: reportPrivateUsage=false
import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.gateway_cluster import (
    MODEL,
    Running,
    Script,
    open_memory_node,
    running_gateway,
)

from kvtide.bus.messages import DecodeFailed, NodeState, Outcome
from kvtide.kv import Role

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
}
LONG = " ".join(f"word{i}" for i in range(30))


@pytest.fixture
async def running(tmp_path: Path) -> AsyncGenerator[Running]:
    async with running_gateway(tmp_path) as running:
        yield running


@asynccontextmanager
async def sent(
    running: Running, body: dict[str, Any]
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A request on a connection of its own, as a client with plain sockets sends it."""
    reader, writer = await asyncio.open_connection(*running.address)
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}"
    )
    writer.write(head.encode() + b"\r\n\r\n" + data)
    try:
        yield reader, writer
    finally:
        writer.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queued", "before the first token", "mid-answer"])
async def test_a_client_that_leaves_cancels_every_stage(
    running: Running, phase: str, stream: bool
) -> None:
    cluster, script = running.cluster, running.script
    script.answer = LONG
    script.conductor_silent = phase == "queued"
    script.hold_at = 5 if phase == "mid-answer" else 0
    async with sent(running, {**CHAT, "stream": stream}) as (_, writer):
        if phase == "queued":
            await cluster.until(lambda: len(cluster.admits) > 0)
        else:
            await cluster.until(lambda: cluster.running == 1)
        if phase == "mid-answer":
            await cluster.until(lambda: cluster.steps == 5)
        writer.transport.abort()
        await cluster.until(lambda: len(cluster.ended) == 1)
    assert cluster.ended[0].outcome is Outcome.CANCELLED
    if phase != "queued":
        await cluster.until(lambda: Role.DECODE in {r for r, _ in cluster.cancels})
        await cluster.until(lambda: cluster.running == 0)
    if phase == "before the first token":
        await cluster.until(lambda: Role.PREFILL in {r for r, _ in cluster.cancels})
    await cluster.until(lambda: open_requests(running) == 0)


def open_requests(running: Running) -> float | None:
    return running.registry.get_sample_value("kvtide_gateway_open_requests")


async def stream_text(response: httpx.Response) -> tuple[str, list[Any]]:
    """The text of a chat's stream, and its last two events."""
    lines = [line async for line in response.aiter_lines() if line.startswith("data")]
    data = [line.removeprefix("data: ") for line in lines]
    chunks = [json.loads(d) for d in data if d != "[DONE]"]
    deltas = [c["choices"][0]["delta"] for c in chunks if c.get("choices")]
    return "".join(d.get("content", "") for d in deltas), [*chunks[-1:], data[-1]]


async def test_a_failed_decode_is_an_error_event_when_nobody_is_left(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            running_gateway(tmp_path, failover_wait_s=1)
        )
        script, cluster = running.script, running.cluster
        script.answer, script.hold_at = LONG, 4
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=running.url, timeout=20)
        )
        response = await stack.enter_async_context(
            http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True})
        )
        # a lone worker is tried again; three times is the most
        for placed in range(1, 4):
            await cluster.until(lambda n=placed: len(cluster.decodes) == n)
            await cluster.until(lambda: cluster.steps >= 4)
            work = cluster.decodes[-1]
            failed = DecodeFailed(
                request=work.request,
                attempt=work.attempt,
                decode=cluster.ref(Role.DECODE),
                code="engine",
                reason="out of memory",
            )
            await cluster.to_gateway(Role.DECODE, work.gateway, failed)
        text, [last, final] = await stream_text(response)
        assert LONG.startswith(text)
        assert text != ""
        assert set(last) == {"error"}
        assert last["error"]["code"] == "workers_failed"
        assert final != "[DONE]"
        await cluster.until(lambda: len(cluster.ended) == 1)
        assert cluster.ended[0].outcome is Outcome.FAILED


async def test_a_stream_goes_on_at_another_decode_worker(running: Running) -> None:
    script, cluster = running.script, running.cluster
    script.answer, script.hold_at = LONG, 6
    async with (
        AsyncExitStack() as stack,
        httpx.AsyncClient(base_url=running.url, timeout=20) as http,
        http.stream(
            "POST",
            "/v1/chat/completions",
            json={**CHAT, "stream": True, "return_token_ids": True},
        ) as response,
    ):
        await cluster.until(lambda: cluster.steps == 6)
        first = cluster.nodes[Role.DECODE]
        second = await stack.enter_async_context(
            open_memory_node(cluster.hub, cluster.clock, Role.DECODE, number=2)
        )
        await cluster.serve(second, Role.DECODE)
        script.hold_at = -1
        cluster.stop(cluster.decodes[0].request, 1)
        await first.close()
        text, [last, final] = await stream_text(response)
    assert text == LONG
    assert (last["choices"][0]["finish_reason"], final) == ("stop", "[DONE]")
    work = cluster.decodes[-1]
    assert work.attempt > 1
    assert len(work.tokens) == work.prompt_tokens + 6


@pytest.mark.parametrize("silent", [1, 2])
async def test_a_silent_conductor_is_passed_over(running: Running, silent: int) -> None:
    cluster = running.cluster
    async with (
        open_memory_node(cluster.hub, cluster.clock, Role.CONDUCTOR, number=2) as node,
        httpx.AsyncClient(base_url=running.url, timeout=20) as http,
    ):
        await cluster.serve(node, Role.CONDUCTOR)
        running.script.silent_node = f"conductor-{silent}"
        assert (await http.post("/v1/chat/completions", json=CHAT)).is_success
    assert len({work.request for work in cluster.decodes}) == 1


async def test_silence_is_filled_with_pings(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, ping_s=0.05) as running:
        running.script.hold_at = 3
        async with sent(running, {**CHAT, "stream": True}) as (reader, _):
            async with asyncio.timeout(40):
                await reader.readuntil(b": ping\n\n")
                await reader.readuntil(b": ping\n\n")
                running.script.go.set()
                await reader.readuntil(b"data: [DONE]\n\n")


async def test_owner_lists_name_what_runs_and_then_nothing(running: Running) -> None:
    script, cluster = running.script, running.cluster
    script.hold_at = 2
    async with sent(running, CHAT):
        await cluster.until(lambda: cluster.running == 1)
        request = cluster.decodes[0].request
        await cluster.until(
            lambda: any(
                request in {r.request for r in o.requests} for o in cluster.owned
            )
        )
        script.go.set()
        await cluster.until(lambda: len(cluster.ended) == 1)
    before = len(cluster.owned)
    await cluster.until(lambda: len(cluster.owned) >= before + 3)
    assert cluster.owned[-1].requests == ()
    assert sorted(o.seq for o in cluster.owned) == [o.seq for o in cluster.owned]


async def test_a_finished_answer_is_acknowledged(running: Running) -> None:
    cluster = running.cluster
    async with httpx.AsyncClient(base_url=running.url, timeout=20) as http:
        await http.post("/v1/chat/completions", json=CHAT)
    await cluster.until(lambda: any(ack.finished for ack in cluster.acks))
    (decoding,) = cluster.generating.values()
    assert cluster.acks[-1].index == len(decoding.ids)


async def test_requests_over_the_limit_are_refused_at_once(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, max_open_requests=1) as running:
        running.script.hold_at = 0
        async with (
            sent(running, CHAT),
            httpx.AsyncClient(base_url=running.url, timeout=20) as http,
        ):
            await running.cluster.until(lambda: running.cluster.running == 1)
            response = await http.post("/v1/chat/completions", json=CHAT)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "server_is_overloaded"
            assert response.headers["retry-after-ms"] == "1000"
            running.script.go.set()
            await running.cluster.until(lambda: open_requests(running) == 0)
            assert (await http.post("/v1/chat/completions", json=CHAT)).is_success


async def test_without_workers_it_is_not_ready_and_says_what_is_missing(
    tmp_path: Path,
) -> None:
    async with (
        running_gateway(tmp_path, workers=False) as running,
        httpx.AsyncClient(base_url=running.url, timeout=20) as http,
    ):
        assert (await http.get("/livez")).status_code == 200
        for path in ("/readyz", "/health"):
            response = await http.get(path)
            assert response.status_code == 503
            assert response.json()["missing"] == [
                "conductor",
                "store",
                "prefill",
                "decode",
            ]
        response = await http.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 503
        assert "no live conductor" in response.json()["error"]["message"]


async def test_it_is_ready_with_its_workers_and_not_without_one(
    running: Running,
) -> None:
    async with httpx.AsyncClient(base_url=running.url, timeout=20) as http:
        response = await http.get("/readyz")
        assert (response.status_code, response.json()["state"]) == (200, "ready")
        nodes = running.cluster.nodes
        nodes[Role.STORE].set_state(NodeState.DRAINING)
        nodes[Role.PREFILL].set_state(NodeState.DRAINING)
        async with asyncio.timeout(40):
            while (await http.get("/readyz")).json()["missing"] != ["store", "prefill"]:
                pass
        # a worker that is ready without a store is enough
        nodes[Role.PREFILL].set_state(NodeState.READY)
        async with asyncio.timeout(40):
            while (await http.get("/readyz")).status_code != 200:
                pass


async def test_at_shutdown_open_streams_finish_and_new_requests_are_refused(
    tmp_path: Path,
) -> None:
    async with (
        running_gateway(tmp_path, drain_s=15) as running,
        httpx.AsyncClient(base_url=running.url, timeout=20) as http,
    ):
        running.script.hold_at = 3
        async with http.stream(
            "POST", "/v1/chat/completions", json={**CHAT, "stream": True}
        ) as response:
            await running.cluster.until(lambda: running.cluster.steps == 3)
            running.stop.set()
            async with asyncio.timeout(40):
                while (ready := await http.get("/readyz")).status_code == 200:
                    pass
            assert ready.json()["state"] == "draining"
            refused = await http.post("/v1/chat/completions", json=CHAT)
            assert refused.status_code == 503
            running.script.go.set()
            text, [_, final] = await stream_text(response)
        assert (text, final) == (running.script.answer, "[DONE]")
        async with asyncio.timeout(40):
            await running.served


async def test_at_shutdown_what_does_not_finish_gets_an_error(tmp_path: Path) -> None:
    async with (
        running_gateway(tmp_path, drain_s=0.05) as running,
        httpx.AsyncClient(base_url=running.url, timeout=20) as http,
    ):
        running.script.hold_at = 3
        async with http.stream(
            "POST", "/v1/chat/completions", json={**CHAT, "stream": True}
        ) as response:
            await running.cluster.until(lambda: running.cluster.steps == 3)
            running.stop.set()
            _, [last, _] = await stream_text(response)
        assert last["error"]["code"] == "shutting_down"
        async with asyncio.timeout(40):
            await running.served
        await running.cluster.until(lambda: running.cluster.running == 0)


async def test_a_gateway_that_was_paused_gives_up_what_it_had_and_goes_on(
    running: Running,
) -> None:
    running.script.hold_at = 3
    async with httpx.AsyncClient(base_url=running.url, timeout=20) as http:
        async with http.stream(
            "POST", "/v1/chat/completions", json={**CHAT, "stream": True}
        ) as response:
            await running.cluster.until(lambda: running.cluster.steps == 3)
            await running.node._fence_self()
            _, [last, _] = await stream_text(response)
        assert "paused" in last["error"]["message"]
        running.script.hold_at = -1
        assert (await http.post("/v1/chat/completions", json=CHAT)).is_success
    epochs = [work.gateway.epoch for work in running.cluster.decodes]
    assert epochs == [1, 2]


async def test_a_port_that_is_taken_is_named(running: Running, tmp_path: Path) -> None:
    _, port = running.address
    with pytest.raises(Exception, match=f":{port}") as caught:
        async with running_gateway(tmp_path / "other", workers=False, http_port=port):
            pass
    assert getattr(caught.value, "key", None) == "http_port"


async def test_many_streams_at_once_are_all_whole(tmp_path: Path) -> None:
    script = Script(answer=LONG, step_s=0.001)
    async with (
        running_gateway(tmp_path, script=script) as running,
        httpx.AsyncClient(base_url=running.url, timeout=50) as http,
    ):

        async def one() -> str:
            body = {**CHAT, "stream": True}
            async with http.stream("POST", "/v1/chat/completions", json=body) as r:
                return (await stream_text(r))[0]

        texts = await asyncio.gather(*(one() for _ in range(16)))
    assert set(texts) == {LONG}
