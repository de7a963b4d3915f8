"""Commands that look on, at a real NATS server and a node that answers as a conductor."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from tests.integration.nats_server import NatsServer, nats_server

from kvtide.bus import Handler, Incoming, Node, open_node
from kvtide.bus.messages import (
    ActualTimes,
    Beat,
    CandidateEstimate,
    Explained,
    ExplainQuery,
    Failure,
    Message,
    NodeState,
    NodeView,
    OtherCandidates,
    StatusQuery,
    StatusReply,
    StoreLoad,
)
from kvtide.bus.subjects import Hop
from kvtide.catalog import (
    CandidateRow,
    Catalog,
    Change,
    DecisionOutcome,
    DecisionRow,
    OthersRow,
    Verdict,
)
from kvtide.catalog.database import catalog_url
from kvtide.catalog.migrate import migrate
from kvtide.kv import NodeId, NodeRef, RequestId, Role, TenantId
from kvtide.runtime import SystemClock
from kvtide.runtime.health import HealthServer, Readiness
from kvtide.runtime.settings import RoleSettings

DEADLINE_S = 40.0


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    with nats_server("--auth", "hush-hush") as server:
        yield server


@pytest.fixture
def settings(nats: NatsServer, tmp_path: Path) -> RoleSettings:
    url = nats.url.replace("nats://", "nats://hush-hush@")
    return RoleSettings(
        nats=url, state_dir=tmp_path / "state", shm_dir=None, node="conductor-7"
    )


async def kvtide(*words: str) -> tuple[int, str, str]:
    """Run it beside this test's loop."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvtide.cli", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "COLUMNS": "200"},
    )
    async with asyncio.timeout(DEADLINE_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def flags(settings: RoleSettings) -> tuple[str, ...]:
    return ("--nats", settings.nats, "--state-dir", str(settings.state_dir))


def store_beat() -> Beat:
    return Beat(
        node=NodeRef(NodeId("store-3"), 5),
        roles=(Role.STORE,),
        seq=1,
        host="abcdef0123",
        state=NodeState.READY,
        steps=0,
        load=(StoreLoad(used_bytes=3 << 20, capacity_bytes=1 << 30, leases=2),),
    )


async def answer(incoming: Incoming) -> Message:
    question = incoming.message
    if isinstance(question, StatusQuery):
        view = NodeView(beat=store_beat(), age_ms=120.0, blocks=17)
        return StatusReply(
            nodes=(view,), indexed_blocks=17, indexed_copies=20, bookings=1, exact=True
        )
    if isinstance(question, ExplainQuery) and question.request == "req-1":
        candidate = CandidateEstimate(
            prefill=NodeId("prefill-a"),
            decode=NodeId("decode-b"),
            hit_tokens=128,
            queue_ms=1.0,
            transfer_ms=2.0,
            prefill_ms=3.0,
            ttft_ms=6.0,
            tbt_ms=9.0,
        )
        return Explained(
            request=question.request,
            attempt=1,
            candidates=(candidate,),
            reason="the longest prefix",
            considered=12,
            others=OtherCandidates(
                candidates=11,
                least_ttft_ms=20.0,
                median_ttft_ms=30.0,
                most_ttft_ms=40.0,
            ),
            actual=ActualTimes(
                outcome="finished",
                cached_tokens=128,
                output_tokens=5,
                ttft_ms=2 * candidate.ttft_ms,
                tbt_ms=None,
            ),
        )
    return Failure(code="unknown_request", reason="nothing is known of this request")


async def know_nothing(incoming: Incoming) -> Message:
    del incoming
    return Failure(code="unknown_request", reason="nothing is known of this request")


@asynccontextmanager
async def conductor(
    settings: RoleSettings, answer: Handler = answer
) -> AsyncGenerator[Node]:
    roles = (Role.CONDUCTOR,)
    async with open_node(
        settings, roles, clock=SystemClock(), registry=CollectorRegistry()
    ) as node:
        await node.inbox(Role.CONDUCTOR, Hop.QUERY, answer)
        node.set_state(NodeState.READY)
        yield node


async def test_status_shows_nodes_load_and_cache(settings: RoleSettings) -> None:
    async with conductor(settings):
        code, out, err = await kvtide("status", *flags(settings))
        assert (code, err) == (0, "")
        assert "store-3" in out
        assert "3.0 MiB of 1.0 GiB, 17 blocks, 2 leases" in out
        assert "17 blocks in 20 copies" in out
        code, out, _ = await kvtide("status", "--json", *flags(settings))
        assert code == 0
        assert json.loads(out)["nodes"][0]["beat"]["node"]["node"] == "store-3"


async def test_explain_shows_candidates_or_says_that_nothing_is_known(
    settings: RoleSettings,
) -> None:
    async with conductor(settings):
        code, out, _ = await kvtide("explain", "req-1", *flags(settings))
        assert code == 0
        assert "req-1, attempt 1: the longest prefix" in out
        assert "128 tokens" in out
        assert "and 11 more: TTFT from 20.0 to 40.0 ms, the median 30.0 ms" in out
        assert ", -50%)" in out
        code, _, err = await kvtide("explain", "req-2", *flags(settings))
        assert code == 75
        assert "nothing is known of request 'req-2'" in err
        assert "no live conductor remembers it" in err
        assert "the catalog has no decision on it" in err


@pytest.mark.parametrize("knowing", ["conductor-1", "conductor-9"])
async def test_explain_asks_all_conductors(
    settings: RoleSettings, knowing: str
) -> None:
    others = settings.model_copy(update={"node": knowing})
    async with conductor(settings, know_nothing), conductor(others):
        code, out, err = await kvtide("explain", "req-1", *flags(settings))
    assert (code, err) == (0, "")
    assert "req-1, attempt 1: the longest prefix" in out
    assert f"(from {knowing})" in out


async def test_explain_reads_in_the_catalog_what_no_conductor_remembers(
    settings: RoleSettings,
) -> None:
    settings.state_dir.mkdir()
    url = catalog_url("", settings.state_dir)
    await migrate(url)
    async with Catalog.open(url) as catalog:
        await catalog.write(decided("mine.0123", "the shortest queue"))
        await catalog.write(decided("mine.4567", "the longest prefix", at_s=9.0))
    async with conductor(settings, know_nothing):
        code, out, err = await kvtide("explain", "mine", *flags(settings))
        assert (code, err) == (0, "")
        assert "mine.4567, attempt 2: the longest prefix" in out
        assert "(from catalog)" in out
        assert "finished, 64 tokens came from the pool, TTFT 7.5 ms" in out
        assert "prefill-a" in out
        assert "and 3 more: TTFT from 7.0 to 9.5 ms, the median 8.0 ms" in out
    # nor is a conductor needed, or the newest one of a name
    words = ("chatcmpl-mine.0123", "--json", *flags(settings))
    code, out, _ = await kvtide("explain", *words)
    assert code == 0
    told = json.loads(out)
    assert (told["request"], told["reason"]) == ("mine.0123", "the shortest queue")
    assert told["outcome"]["cached_tokens"] == 64


def decided(name: str, reason: str, *, at_s: float = 1.0) -> list[Change]:
    """A request that was placed twice, and how it ended."""
    request = RequestId(name)
    candidate = CandidateRow(
        prefill=NodeId("prefill-a"),
        decode=NodeId("decode-b"),
        hit_tokens=128,
        queue_ms=1.0,
        transfer_ms=2.0,
        prefill_ms=3.0,
        ttft_ms=6.0,
        tbt_ms=9.0,
    )
    first = DecisionRow(
        request=request,
        attempt=1,
        conductor=NodeId("conductor-7"),
        tenant=TenantId("t"),
        model="m",
        verdict=Verdict.PLACED,
        code="",
        reason="the first attempt",
        prefill=candidate.prefill,
        decode=candidate.decode,
        prompt_tokens=200,
        hit_tokens=128,
        considered=4,
        candidates=(candidate,),
        decided_at_s=at_s,
        others=OthersRow(3, 7.0, 8.0, 9.5),
    )
    second = replace(first, attempt=2, reason=reason, decided_at_s=at_s + 1)
    return [first, second, DecisionOutcome(request, 2, "finished", 64, 7.5, None)]


async def test_tail_decodes_live_messages_without_types(
    settings: RoleSettings,
) -> None:
    async with conductor(settings):
        subject = "kvtide.local.beat.*"
        code, out, _ = await kvtide(
            "bus", "tail", "--count", "2", "--subject", subject, *flags(settings)
        )
    assert code == 0
    lines = out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("kvtide.local.beat.conductor-7 conductor-7@")
    assert " beat " in lines[0]
    assert '"conductor"' in lines[0]


async def test_without_a_conductor_or_a_server_it_says_so(
    settings: RoleSettings,
) -> None:
    code, _, err = await kvtide("status", *flags(settings))
    assert code == 75
    assert "no conductor answers in cluster 'local' (heard of none)" in err
    gone = settings.model_copy(update={"nats": "nats://word@127.0.0.1:1"})
    code, _, err = await kvtide("status", *flags(gone))
    assert code == 75
    assert "no NATS server answers at nats://********@127.0.0.1:1" in err


async def test_the_nats_of_a_local_up_is_found_by_itself(
    settings: RoleSettings,
) -> None:
    run = settings.state_dir / "run"
    run.mkdir(parents=True)
    (run / "nats.url").write_text(settings.nats + "\n")
    async with conductor(settings):
        code, out, _ = await kvtide("status", "--state-dir", str(settings.state_dir))
    assert code == 0
    assert "store-3" in out


async def test_doctor_finds_what_is_there_and_fails_on_what_is_not(
    settings: RoleSettings,
) -> None:
    code, out, _ = await kvtide("doctor", "--json", *flags(settings))
    findings = {item["subject"]: item for item in json.loads(out)}
    assert code == 0
    assert findings["NATS"]["level"] == "ok"
    assert "max_payload 1.0 MiB" in findings["NATS"]["text"]
    assert "hush-hush" not in out
    assert "made at the first start" in findings["catalog"]["text"]
    (matrix,) = [item["matrix"] for item in json.loads(out) if "matrix" in item]
    assert {"preferred", "secondary"} == matrix["cpu:0"].keys()

    settings.state_dir.mkdir(exist_ok=True)
    await migrate(catalog_url("", settings.state_dir))
    missing = ("--nats", "nats://127.0.0.1:1", "--state-dir", str(settings.state_dir))
    code, out, _ = await kvtide("doctor", "--json", *missing)
    findings = {item["subject"]: item for item in json.loads(out)}
    assert code == 1
    assert findings["NATS"]["level"] == "fail"
    assert "--nats" in findings["NATS"]["advice"]
    assert "the newest" in findings["catalog"]["text"]


def test_health_is_an_exit_code() -> None:
    readiness = [Readiness(True, "ready")]
    registry = CollectorRegistry()
    with HealthServer(registry=registry, readiness=lambda: readiness[0]) as server:
        url = f"{server.url}/readyz"
        command = [sys.executable, "-m", "kvtide.cli", "health", url]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603
        readiness[0] = Readiness(False, "loading")
        done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603
        assert done.returncode == 1
        assert b"503" in done.stdout
    done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603
    assert done.returncode == 1
    assert b"no answer" in done.stdout
