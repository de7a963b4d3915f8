"""A client that leaves stops the engine, whichever API it spoke: over real TCP."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.integration.gateway_cluster import MODEL, Script, running_gateway

from kvtide.bus.messages import Outcome
from kvtide.kv import Role

TURNS = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 400},
}
STEP_S = 0.03
STEPS_AFTER = 2
"""What may still be finished when a client has gone."""


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", BODIES)
async def test_at_most_two_steps_finish_after_the_client_has_gone(
    tmp_path: Path, path: str, stream: bool
) -> None:
    script = Script(answer="word " * 90, step_s=STEP_S)
    async with running_gateway(tmp_path, script=script) as running:
        cluster = running.cluster
        _, writer = await asyncio.open_connection(*running.address)
        body = json.dumps({"model": MODEL, "stream": stream, **BODIES[path]}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await cluster.until(lambda: cluster.steps >= 3)
        gone_at = cluster.steps
        writer.transport.abort()
        await cluster.until(lambda: cluster.running == 0)
        assert cluster.steps <= gone_at + STEPS_AFTER
        await cluster.until(lambda: len(cluster.ended) == 1)
        assert cluster.ended[0].outcome is Outcome.CANCELLED
        assert Role.DECODE in {role for role, _ in cluster.cancels}
        open_now = running.registry.get_sample_value("kvtide_gateway_open_requests")
        assert open_now == 0
        # and the owner lists, which free what a lost cancel would leave, name nothing
        seen = len(cluster.owned)
        await cluster.until(lambda: len(cluster.owned) > seen)
        assert cluster.owned[-1].requests == ()
