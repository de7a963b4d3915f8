"""What the dashboard asks of the catalog, of conductors that are gone, and of metrics."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from tests.integration.gateway_nodes import open_memory_node

from kvtide.bus import MemoryHub
from kvtide.catalog import (
    CandidateRow,
    Catalog,
    DecisionOutcome,
    DecisionRow,
    OthersRow,
    RequestRow,
    Verdict,
)
from kvtide.gateway.ui.answers import Answers, Unknown
from kvtide.gateway.ui.recent import Recent
from kvtide.gateway.ui.traffic import bytes_moved
from kvtide.kv import NodeId, RequestId, Role, TenantId
from kvtide.runtime import SystemClock
from kvtide.runtime.metrics import exposition
from kvtide.transfer.interface import Operation
from kvtide.transfer.metrics import PrometheusObserver

CHOSEN = CandidateRow(
    prefill=NodeId("p"),
    decode=NodeId("d"),
    hit_tokens=64,
    queue_ms=1.0,
    transfer_ms=2.0,
    prefill_ms=30.0,
    ttft_ms=40.0,
    tbt_ms=9.0,
)


def decision(
    name: str, verdict: Verdict = Verdict.PLACED, code: str = ""
) -> DecisionRow:
    return DecisionRow(
        request=RequestId(name),
        attempt=1,
        conductor=NodeId("c"),
        tenant=TenantId("t"),
        model="m",
        verdict=verdict,
        code=code,
        reason="because",
        prefill=NodeId("p"),
        decode=NodeId("d"),
        prompt_tokens=100,
        hit_tokens=64,
        considered=5,
        candidates=(CHOSEN,),
        decided_at_s=1000.0,
        others=OthersRow(4, 41.0, 50.0, 90.0),
    )


def end(name: str) -> tuple[DecisionOutcome, RequestRow]:
    outcome = DecisionOutcome(
        request=RequestId(name),
        attempt=1,
        outcome="finished",
        cached_tokens=64,
        ttft_ms=50.0,
        tbt_ms=10.0,
    )
    row = RequestRow(
        request=RequestId(name),
        attempt=1,
        gateway=NodeId("g"),
        tenant=TenantId("t"),
        model="m",
        outcome="finished",
        code="stop",
        prompt_tokens=100,
        cached_tokens=64,
        output_tokens=7,
        ttft_ms=50.0,
        tbt_ms=10.0,
        total_ms=120.0,
        ended_at_s=1001.0,
    )
    return outcome, row


@pytest.fixture
async def catalog(tmp_path: Path) -> AsyncGenerator[Catalog]:
    async with Catalog.open(f"sqlite:///{tmp_path / 'catalog.db'}") as catalog:
        await catalog.migrate()
        yield catalog


@pytest.fixture
async def answers(catalog: Catalog) -> AsyncGenerator[Answers]:
    clock = SystemClock()
    async with open_memory_node(MemoryHub(clock), clock, Role.GATEWAY) as node:
        yield Answers(node, catalog)


async def test_a_decision_that_no_conductor_remembers_is_read_from_the_catalog(
    catalog: Catalog, answers: Answers
) -> None:
    await catalog.write([decision("r1")])
    found = await answers.explanation("r1")
    assert (found.reason, found.considered, found.actual) == ("because", 5, None)
    assert found.candidates[0].ttft_ms == CHOSEN.ttft_ms
    assert found.others is not None
    assert (found.others.candidates, found.others.most_ttft_ms) == (4, 90.0)
    await catalog.write(end("r1"))
    actual = (await answers.explanation("r1")).actual
    assert actual is not None
    assert (actual.outcome, actual.output_tokens, actual.ttft_ms) == (
        "finished",
        7,
        50.0,
    )


async def test_why_there_is_no_explanation_is_said(
    tmp_path: Path, answers: Answers
) -> None:
    with pytest.raises(Unknown, match="nor does the catalog"):
        await answers.explanation("nobody")
    clock = SystemClock()
    async with (
        Catalog.open(f"sqlite:///{tmp_path / 'without-tables.db'}") as empty,
        open_memory_node(MemoryHub(clock), clock, Role.GATEWAY) as node,
    ):
        lost = Answers(node, empty)
        with pytest.raises(Unknown, match="catalog does not answer"):
            await lost.explanation("nobody")
        assert "catalog does not answer" in (await lost.targets(10)).missing


async def test_targets_count_verdicts_and_pair_predictions_with_what_came(
    catalog: Catalog, answers: Answers
) -> None:
    refused = decision("r2", Verdict.REJECTED, "overloaded")
    await catalog.write([decision("r1"), *end("r1"), refused, decision("r3")])
    view = await answers.targets(10)
    assert view.decisions == {"placed": 2, "rejected": 1}
    assert view.reasons == {"overloaded": 1}
    assert view.ttft_pairs == [(40.0, 50.0)]
    assert view.tbt_pairs == [(9.0, 10.0)]


async def test_many_pages_cost_one_question() -> None:
    asked = 0

    async def ask() -> int:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        return asked

    recent = Recent[int](SystemClock(), keep_s=60.0, most=2)
    answers = await asyncio.gather(*(recent.get("a", ask) for _ in range(5)))
    assert answers == [1] * 5
    assert await recent.get("b", ask) == 2
    assert await recent.get("c", ask) == 3
    assert await recent.get("a", ask) == 4  # forgotten
    hasty = Recent[int](SystemClock(), keep_s=0.0)
    assert [await hasty.get("a", ask) for _ in range(2)] == [5, 6]


def test_only_what_a_process_moved_as_a_client_is_traffic() -> None:
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry)
    observer.transferred("shm", "reuse", Operation.READ, 100, 0.1)
    observer.transferred("shm", "reuse", Operation.WRITE, 20, 0.1)
    observer.transferred("tcp", "handover", Operation.READ, 3, 0.1)
    observer.served("tcp", "drain", Operation.READ, 5000)
    moved = bytes_moved(exposition(registry)[1].decode())
    assert moved == {("reuse", "shm"): 120.0, ("handover", "tcp"): 3.0}
    given = bytes_moved(exposition(registry)[1].decode(), "server")
    assert given == {("drain", "tcp"): 5000.0}
