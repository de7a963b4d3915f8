"""A gateway with ``workload_log`` writes a file that the simulator reads."""

from pathlib import Path

import httpx
from tests.integration.gateway_cluster import MODEL, running_gateway
from tests.integration.gateway_script import FACTS

from kvtide.sim.perf.workload import read_workload


async def test_each_request_becomes_a_line(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "tell me of the sea " * 20}],
        "temperature": 0,
    }
    async with running_gateway(tmp_path, workload_log=path) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=20) as http:
            answers = [
                await http.post("/v1/chat/completions", json=asked) for _ in range(2)
            ]
        await running.cluster.until(lambda: len(running.cluster.ended) == 2)
    one, two = list(read_workload(path, FACTS.block_tokens))
    usage = answers[0].json()["usage"]
    assert one.prompt_tokens == usage["prompt_tokens"]
    assert one.output_tokens == usage["completion_tokens"]
    assert len(one.blocks) == one.prompt_tokens // FACTS.block_tokens > 0
    assert one.blocks == two.blocks
    assert "sea" not in path.read_text()
