"""Two real conductors on a real NATS server: one is killed, the other knows the same."""

import asyncio
import contextlib
import signal
from pathlib import Path

import httpx
import pytest
from tests.integration.conductor_site import (
    Conductors,
    conductors,
    settled,
    two_and_a_store,
)
from tests.integration.conductor_stand_ins import (
    until,
    workers_on,
)
from tests.integration.nats_server import nats_server
from tests.integration.postgres import postgres_server
from tests.unit.conductor_cluster import admit, ended, key, keys

from kvtide.bus import Hop
from kvtide.bus.messages import (
    Explained,
    ExplainQuery,
    Placed,
)
from kvtide.catalog import Catalog, CatalogError, DecisionRow, RequestRow
from kvtide.kv import NodeId, RequestId, Role


async def scaling(cluster: Conductors, name: str) -> dict[str, dict[str, float]]:
    """What a conductor advises an autoscaler."""
    member = cluster.us.roster.get(NodeId(name))
    assert member is not None
    async with httpx.AsyncClient(trust_env=False) as http:
        return (await http.get(f"{member.beat.http}/scaling", timeout=20)).json()


@pytest.mark.timeout(240)
async def test_a_killed_conductor_leaves_one_that_knows_the_same(
    tmp_path: Path,
) -> None:
    async with two_and_a_store(tmp_path) as (cluster, store):
        await store.add(keys(10))
        await store.add(keys(3000, start=100), said=False)  # a gap: needs a pull
        await store.drop([key(9)])
        for name in ("c1", "c2"):
            status = await cluster.until(
                name, lambda s: s.indexed_copies == 3009 and settled(s, 8)
            )
            status = await cluster.until(name, lambda s: s.exact)
            views = {view.beat.node.node: view.blocks for view in status.nodes}
            assert views[NodeId("s1")] == 3009
            assert {"p1", "p2", "d1", "d2", "c1", "c2", "g1"} <= set(views)
            advised = await scaling(cluster, name)
            assert {role: each["workers"] for role, each in advised.items()} == {
                "prefill": 2,
                "decode": 2,
            }
            assert all(each["wanted"] >= 1 for each in advised.values())

        first = await cluster.placed("c1", admit("r1"))
        assert [copy.key for copy in first.reuse] == list(keys(9))
        assert await cluster.ask("c1", admit("r1")) == first
        await cluster.until("c2", lambda s: s.bookings == 1)

        epoch = cluster.epoch("c1")
        await cluster.end("c1", signal.SIGKILL)
        same = await cluster.placed("c2", admit("r1"))
        assert (same.prefill, same.decode) == (first.prefill, first.decode)
        assert same.reuse == first.reuse

        await cluster.start("c1")
        await until(lambda: cluster.is_live("c1") and cluster.epoch("c1") > epoch)
        await cluster.until(
            "c1",
            lambda s: s.exact and s.indexed_copies == 3009 and settled(s, 8),
        )
        again = await cluster.placed("c1", admit("r2"))
        assert again.reuse == first.reuse


@pytest.mark.timeout(240)
async def test_decisions_and_ends_are_in_the_catalog_and_a_stop_is_clean(
    tmp_path: Path,
) -> None:
    with nats_server() as server:
        async with (
            workers_on(server.url),
            conductors(server, tmp_path, "c1", "c2") as cluster,
        ):
            for name in ("c1", "c2"):
                await cluster.until(name, lambda s: settled(s, 7))
            placed = await cluster.placed("c1", admit("r1"))
            explain = ExplainQuery(request=RequestId("r1"))
            us = cluster.us
            inbox = us.subjects.inbox(Role.CONDUCTOR, NodeId("c1"), Hop.QUERY)
            explained = await us.bus.request(inbox, explain, timeout_s=5)
            assert isinstance(explained, Explained)
            assert explained.reason == placed.reason
            await cluster.ask("c2", admit("r2", model="none"))
            await cluster.until("c2", lambda s: s.bookings == 1)
            over = ended("r1")
            await us.bus.publish(us.subjects.ended(us.ref.node), over)
            for name in ("c1", "c2"):
                await cluster.until(name, lambda s: s.bookings == 0)
                assert await cluster.end(name, signal.SIGTERM) == 0
        async with Catalog.open(cluster.catalog) as catalog:
            (decision,) = await catalog.decisions(RequestId("r1"))
            assert_true(decision, placed)
            request = await catalog.request(RequestId("r1"))
            assert isinstance(request, RequestRow)
            assert (request.ttft_ms, request.output_tokens) == (12.0, 5)
            (refused,) = await catalog.decisions(RequestId("r2"))
            assert (refused.verdict, refused.code) == ("rejected", "unknown_model")
            nodes = {row.node: row for row in await catalog.nodes()}
            assert {"p1", "d1", "g1", "c1", "c2"} <= set(nodes)
            assert nodes[NodeId("p1")].roles == ("prefill",)


def assert_true(decision: DecisionRow, placed: Placed) -> None:
    assert decision.conductor == "c1"
    assert decision.decode == placed.decode.node
    assert decision.candidates[0].ttft_ms == placed.chosen.ttft_ms
    assert decision.considered == 2
    assert decision.outcome is not None
    assert decision.outcome.ttft_ms == 12.0


@pytest.mark.timeout(240)
async def test_a_conductor_serves_while_its_catalog_cannot_be_reached(
    tmp_path: Path,
) -> None:
    with nats_server() as server:
        async with (
            workers_on(server.url),
            conductors(server, tmp_path) as cluster,
        ):
            # a folder where the database file should be
            (tmp_path / "catalog.sqlite3").mkdir()
            await cluster.start("c1")
            await until(lambda: cluster.is_live("c1"))
            await cluster.until("c1", lambda s: settled(s, 6))
            assert await cluster.placed("c1", admit("r1"))
            assert await cluster.end("c1", signal.SIGTERM) == 0


@pytest.mark.timeout(240)
async def test_placements_go_on_while_postgres_is_down_and_are_recorded_after(
    tmp_path: Path,
) -> None:
    with nats_server() as server, postgres_server() as postgres:
        if postgres.process is None:
            pytest.skip("the given server is not ours to kill")
        url = await postgres.create_database()
        async with (
            workers_on(server.url),
            conductors(server, tmp_path, "c1", "c2", catalog=url) as cluster,
            Catalog.open(url) as catalog,
        ):
            for name in ("c1", "c2"):
                await cluster.until(name, lambda s: settled(s, 7))
            await cluster.placed("c1", admit("r1"))
            await recorded(catalog, "r1")
            postgres.kill()
            for number in range(2, 6):
                await cluster.placed("c1", admit(f"r{number}"))
            postgres.restart()
            for number in range(1, 6):
                await recorded(catalog, f"r{number}")


async def recorded(catalog: Catalog, request: str) -> None:
    """Wait until the decision on a request is in the catalog."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(CatalogError):
                if await catalog.decisions(RequestId(request)):
                    return
            await asyncio.sleep(0.1)
