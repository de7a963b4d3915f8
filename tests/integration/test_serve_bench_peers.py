"""The scripts in ops/bench/vs_vllm: what of them needs no vLLM."""

import importlib.util
import json
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
from tests.integration.openai_server import serving

from kvtide.cli.serve_bench.dialogue import Api, Style
from kvtide.cli.serve_bench.load import Load, Manner
from kvtide.cli.serve_bench.outcomes import Outcome
from kvtide.cli.serve_bench.workload import Mix, of_mix
from kvtide.runtime import SystemClock

SCRIPTS = Path(__file__).parents[2] / "ops" / "bench" / "vs_vllm"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_requests_go_round_and_answers_come_whole() -> None:
    async with serving() as first, serving() as second:
        proxy = script("round_robin").application([first.url, second.url])
        second.faults = {1: "503"}
        transport = httpx.ASGITransport(proxy)
        async with (
            proxy.router.lifespan_context(proxy),  # closes its connections
            httpx.AsyncClient(transport=transport, base_url="http://proxy") as client,
        ):
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "m"
            how = Manner(Api.COMPLETIONS, Style("m"), 0, 20.0, concurrency=1)
            load = Load(client, how, SystemClock())
            found = await load.run(of_mix(Mix(8, 4, 3), 0))
    assert len(first.asked) == len(second.asked) == 4
    ends = Counter(each.outcome for each in found)
    assert ends == {Outcome.COMPLETED: 7, Outcome.REFUSED: 1}
    assert found[3].outcome is Outcome.REFUSED
    assert {len(each.arrivals_s) for each in found} == {3, 0}


def test_pieces_add_up_to_a_page(tmp_path: Path) -> None:
    kept = script("report").Kept(tmp_path)
    piece: dict[str, Any] = {
        "kvtide_ms": 900.0,
        "vllm_ms": 2000.0,
        "ratio": 0.45,
        "bar": 0.5,
        "met": True,
        "products_ms": 600.0,
        "kvtide_to_products": 1.5,
        "strangers": 0.02,
    }
    kept.add("ttft-2048", piece, {"machine": "this one"})
    spread = {"mean": 1.0, "p50": 1.0, "p90": 2.0}
    summary: dict[str, Any] = {
        "requests": 4,
        "outcomes": {"completed": 3},
        "goodput": 0.5,
        "hit_share": None,
        "span_s": 2.0,
        "output_tokens_per_s": 1.0,
        **dict.fromkeys(("ttft_ms", "tbt_ms", "tpot_ms"), spread),
    }
    trace = {
        "summary": summary,
        "sizes": {"worker_tokens": 8},
        "goodput_at": {"x": 0.25},
    }
    again = script("report").Kept(tmp_path)
    again.add("trace-kvtide", trace, {"machine": "this one"})
    page = (tmp_path / "vs_vllm.md").read_text()
    assert (
        "| ttft-2048 | 900 | 2,000 | 0.45 | at most 0.5 | met | 600 | 1.50 | 2% |"
        in page
    )
    assert "| goodput | 50.0% |" in page
    assert "| goodput at x | 25.0% |" in page
    assert "| size: worker_tokens | 8 |" in page
    assert page.count("this one") == 1
    assert set(json.loads((tmp_path / "vs_vllm.json").read_text())) == {
        "ttft-2048",
        "trace-kvtide",
    }
