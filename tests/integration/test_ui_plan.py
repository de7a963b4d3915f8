"""A plan on the recent load, asked for over HTTP of a real gateway."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest
from tests.integration.gateway_cluster import running_gateway

from kvtide.gateway.ui.plan_routes import example_cluster
from kvtide.gateway.ui.planner import (
    NothingLoggedError,
    PlanBusyError,
    PlanEndedError,
    Planner,
    PlanQuestion,
    newest_lines,
)
from kvtide.kv import LoggedRequest
from kvtide.runtime import SystemClock

QUESTION = PlanQuestion(example_cluster(64), 50, 1.0, 30_000.0, 200.0)


def write_log(path: Path, requests: int) -> None:
    lines = [
        LoggedRequest(500.0 * n, 300, 20, (1, 2, 3, n + 9), 64, "m").line()
        for n in range(requests)
    ]
    path.write_bytes(b"".join(lines))


@pytest.fixture
async def http(tmp_path: Path) -> AsyncGenerator[httpx.AsyncClient]:
    async with (
        running_gateway(tmp_path, workload_log=tmp_path / "load.jsonl") as running,
        httpx.AsyncClient(base_url=running.url, timeout=100) as http,
    ):
        yield http


async def test_there_is_no_plan_of_nothing_nor_for_another_site(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    start = (await http.get("/admin/ui/plan")).json()
    assert (start["log"], start["empty"]) == (str(tmp_path / "load.jsonl"), True)
    body = {"cluster": start["cluster"], "requests": 30}
    empty = await http.post("/admin/ui/plan", json=body)
    assert empty.status_code == 409
    assert "no request is in the workload log" in empty.json()["error"]["message"]
    foreign = await http.post(
        "/admin/ui/plan", content=b"{}", headers={"content-type": "text/plain"}
    )
    assert foreign.status_code == 415
    many = await http.post("/admin/ui/plan", json={**body, "requests": 1_000_000})
    assert many.json()["error"]["param"] == "requests"


@pytest.mark.full
@pytest.mark.timeout(120)
async def test_a_plan_is_made_of_the_newest_requests(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    write_log(tmp_path / "load.jsonl", 40)
    start = (await http.get("/admin/ui/plan")).json()
    assert not start["empty"]
    assert "block_tokens = 64" in start["cluster"]
    body = {"cluster": start["cluster"], "requests": 30}
    made = (await http.post("/admin/ui/plan", json=body)).json()
    assert made["requests"] == 30
    assert made["html"].startswith("<!doctype html>")
    assert "kvtide plan: recent.jsonl on cluster.toml" in made["html"]
    assert "kvtide-plan-" not in made["said"]
    wrong = await http.post("/admin/ui/plan", json={"cluster": "prefills = 1"})
    assert wrong.status_code == 400
    assert "decodes" in wrong.json()["error"]["message"]


async def test_one_plan_at_a_time_and_none_for_ever(tmp_path: Path) -> None:
    log = tmp_path / "load.jsonl"
    write_log(log, 20)
    ends = False
    planner = Planner(log, SystemClock(), lambda: ends, limit_s=0.6)
    slow = asyncio.ensure_future(planner.plan(QUESTION))
    await asyncio.sleep(0)
    with pytest.raises(PlanBusyError):
        await planner.plan(QUESTION)
    with pytest.raises(PlanEndedError, match=r"no plan after 1 s|fewer requests"):
        await slow
    ends = True
    with pytest.raises(PlanEndedError, match="about to end"):
        await planner.plan(QUESTION)
    with pytest.raises(NothingLoggedError, match="workload_log"):
        await Planner(None, SystemClock(), lambda: False).plan(QUESTION)


def test_the_newest_lines_go_on_from_the_file_before(tmp_path: Path) -> None:
    log = tmp_path / "load.jsonl"
    (tmp_path / "load.jsonl.1").write_bytes(b"1\n2\n3\n")
    log.write_bytes(b"4\n5\nunfinished")
    assert newest_lines(log, 3) == [b"3\n", b"4\n", b"5\n"]
    assert newest_lines(log, 1) == [b"5\n"]
    assert newest_lines(tmp_path / "none", 5) == []
