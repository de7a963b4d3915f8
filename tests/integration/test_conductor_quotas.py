"""Tenants' limits hold for four gateways and two conductors on a real NATS server."""

import asyncio
import json
import signal
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from tests.integration.conductor_site import Conductors, conductors, settled
from tests.integration.conductor_stand_ins import CLOCK, node_on, workers_on
from tests.integration.nats_server import nats_server
from tests.unit.conductor_cluster import admit, ended

from kvtide.bus import BusError, Hop, Node
from kvtide.bus.messages import AnyMessage, Placed, RejectCode, Rejected
from kvtide.kv import NodeId, Role, TenantId, rendezvous_order

TENANT = TenantId("t")
CONCURRENT = 6
PER_MIN = 120.0
PATIENCE_S = 0.25
ANSWER_LIMIT_S = 10.0


@dataclass
class Gateways:
    """Ask as gateways do: the tenant's home first, the next one after a while."""

    nodes: list[Node]
    dice: Random = field(default_factory=lambda: Random(3))  # noqa: S311 - for a test
    open: set[str] = field(default_factory=set[str])
    most: int = 0
    placed_s: list[tuple[float, float]] = field(
        default_factory=list[tuple[float, float]]
    )
    """When a placement was asked for, and when it came: it was granted in between."""
    refused: int = 0
    asked: int = 0

    async def load(self, workers: int, seconds: float, home_first: float) -> None:
        """``workers`` at once, each asking again as soon as its request is over."""
        end_s = CLOCK.monotonic() + seconds

        async def one() -> None:
            while CLOCK.monotonic() < end_s:
                await self._request(home_first)

        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(one())

    async def _request(self, home_first: float) -> None:
        self.asked += 1
        name = f"r{self.asked}"
        node = self.dice.choice(self.nodes)
        rank = 0 if self.dice.random() < home_first else 1
        asked_s = CLOCK.monotonic()
        answer = await self._answer(node, name, rank)
        if isinstance(answer, Rejected):
            assert answer.code is RejectCode.TENANT_LIMIT
            assert answer.retry_after_ms is not None
            self.refused += 1
            await CLOCK.sleep(0.02)
            return
        self.open.add(name)
        self.most = max(self.most, len(self.open))
        self.placed_s.append((asked_s, CLOCK.monotonic()))
        await CLOCK.sleep(self.dice.uniform(0.01, 0.15))
        self.open.discard(name)
        over = msgspec.structs.replace(ended(name), gateway=node.ref)
        await node.bus.publish(node.subjects.ended(node.ref.node), over)

    async def _answer(self, node: Node, name: str, rank: int) -> Placed | Rejected:
        question = admit(name, tokens=100, max_new_tokens=10, gateway=node.ref)
        waiting: set[asyncio.Task[AnyMessage | None]] = set()
        async with asyncio.timeout(ANSWER_LIMIT_S), asyncio.TaskGroup() as group:
            while True:
                live = [each.ref for each in node.roster.live(Role.CONDUCTOR)]
                if not live:  # none was heard of yet
                    await CLOCK.sleep(0.02)
                    continue
                order = rendezvous_order(TENANT, live)
                inbox = node.subjects.inbox(
                    Role.CONDUCTOR, order[rank % len(order)].node, Hop.ADMIT
                )
                asking = node.bus.request(inbox, question, timeout_s=5)
                waiting.add(group.create_task(_quietly(asking)))
                done, waiting = await asyncio.wait(waiting, timeout=PATIENCE_S)
                for task in done:
                    answer = task.result()
                    if isinstance(answer, Placed | Rejected):
                        for late in waiting:
                            late.cancel()
                        return answer
                rank += 1

    def rate_excess(self) -> float:
        """How many more were placed than any stretch of time allows."""
        latest_s = self.placed_s[-1][1]
        first_s, most = latest_s, -PER_MIN
        for count, (asked_s, _) in enumerate(reversed(self.placed_s), 1):
            first_s = min(first_s, asked_s)
            allowed = PER_MIN + (latest_s - first_s) * PER_MIN / 60
            most = max(most, count - allowed)
        return most


async def _quietly(asking: Coroutine[Any, Any, AnyMessage]) -> AnyMessage | None:
    """The reply, or nothing from a conductor that is dead."""
    try:
        return await asking
    except BusError:
        return None


@pytest.mark.timeout(240)
async def test_four_gateways_and_two_conductors_keep_a_tenants_limits(
    tmp_path: Path,
) -> None:
    tenants = {TENANT: {"concurrent_requests": CONCURRENT, "requests_per_min": PER_MIN}}
    with nats_server() as server:
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            await enter(workers_on(server.url))
            cluster = await enter(
                conductors(server, tmp_path, "c1", "c2", tenants=json.dumps(tenants))
            )
            nodes = [
                await enter(node_on(server.url, f"gw{n}", Role.GATEWAY))
                for n in range(4)
            ]
            for name in ("c1", "c2"):
                await cluster.until(name, lambda s: settled(s, 11))
            gateways = Gateways(nodes)
            # half of the questions go to the conductor that isn't the home
            await gateways.load(24, 2.5, home_first=0.5)
            assert gateways.most == CONCURRENT
            assert gateways.rate_excess() <= 0
            assert gateways.refused > 0
            await killed_and_back(cluster, gateways)


async def killed_and_back(cluster: Conductors, gateways: Gateways) -> None:
    """The home dies under load, and comes back without any memory."""
    names = [NodeId("c1"), NodeId("c2")]
    refs = [cluster.us.roster.get(name) for name in names]
    home, _ = rendezvous_order(TENANT, [each.ref for each in refs if each is not None])
    asked = gateways.asked
    gateways.most = 0
    async with asyncio.TaskGroup() as group:
        group.create_task(gateways.load(12, 3.0, home_first=0.8))
        await CLOCK.sleep(0.5)
        await cluster.end(home.node, signal.SIGKILL)
        await CLOCK.sleep(0.5)
        await cluster.start(home.node)
    assert gateways.asked > asked + 12
    # those whose placement the other one had not heard of when it took over
    assert gateways.most <= CONCURRENT + 1
    assert gateways.rate_excess() <= 1
