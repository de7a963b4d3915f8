"""Real conductors in processes of their own on a real NATS server, and how to ask them."""

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.integration.conductor_stand_ins import (
    PretendedStore,
    node_on,
    until,
    workers_on,
)
from tests.integration.nats_server import NatsServer, nats_server

from kvtide.bus import Hop, Node
from kvtide.bus.messages import (
    Admit,
    NodeState,
    Placed,
    Rejected,
    StatusQuery,
    StatusReply,
)
from kvtide.kv import NodeId, Role

PROGRAM = Path(__file__).with_name("conductor_process.py")


@dataclass
class Conductors:
    """Processes by name, and how to talk to them from the node ``us``."""

    server: NatsServer
    folder: Path
    us: Node
    processes: dict[str, asyncio.subprocess.Process]
    catalog: str
    tenants: str = "{}"

    async def start(self, name: str) -> None:
        arguments = (
            *(name, self.server.url, str(self.folder / name)),
            *(self.catalog, self.tenants),
        )
        self.processes[name] = await asyncio.create_subprocess_exec(
            sys.executable, str(PROGRAM), *arguments
        )

    async def end(self, name: str, how: signal.Signals) -> int:
        process = self.processes.pop(name)
        process.send_signal(how)
        async with asyncio.timeout(60):
            return await process.wait()

    async def ask(self, name: str, question: Admit) -> Placed | Rejected:
        inbox = self.us.subjects.inbox(Role.CONDUCTOR, NodeId(name), Hop.ADMIT)
        answer = await self.us.bus.request(inbox, question, timeout_s=5)
        assert isinstance(answer, Placed | Rejected), answer
        return answer

    async def placed(self, name: str, question: Admit) -> Placed:
        answer = await self.ask(name, question)
        assert isinstance(answer, Placed), answer
        return answer

    async def status(self, name: str) -> StatusReply:
        inbox = self.us.subjects.inbox(Role.CONDUCTOR, NodeId(name), Hop.QUERY)
        answer = await self.us.bus.request(inbox, StatusQuery(), timeout_s=5)
        assert isinstance(answer, StatusReply), answer
        return answer

    async def until(
        self, name: str, condition: Callable[[StatusReply], bool]
    ) -> StatusReply:
        async with asyncio.timeout(60):
            while not condition(status := await self.status(name)):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
        return status

    def epoch(self, name: str) -> int:
        return self.us.roster.epoch(NodeId(name))

    def is_live(self, name: str) -> bool:
        member = self.us.roster.get(NodeId(name))
        return member is not None and member.ready


def settled(status: StatusReply, nodes: int) -> bool:
    """So many nodes are known, and the workers among them as ready."""
    workers = [
        view.beat
        for view in status.nodes
        if {Role.PREFILL, Role.DECODE} & set(view.beat.roles)
    ]
    ready = all(worker.state is NodeState.READY for worker in workers)
    return len(status.nodes) == nodes and ready


@asynccontextmanager
async def two_and_a_store(
    folder: Path,
) -> AsyncGenerator[tuple[Conductors, PretendedStore]]:
    """Conductors ``c1`` and ``c2``, idle workers, and a store ``s1`` that has nothing."""
    with nats_server() as server:
        async with (
            workers_on(server.url),
            node_on(server.url, "s1", Role.STORE) as store_node,
            conductors(server, folder, "c1", "c2") as cluster,
        ):
            store = PretendedStore(store_node)
            await store.start()
            yield cluster, store


@asynccontextmanager
async def conductors(
    server: NatsServer,
    folder: Path,
    *names: str,
    catalog: str = "",
    tenants: str = "{}",
) -> AsyncGenerator[Conductors]:
    async with node_on(server.url, "g1", Role.GATEWAY) as us:
        url = catalog or f"sqlite:///{folder}/catalog.sqlite3"
        found = Conductors(server, folder, us, {}, url, tenants)
        try:
            for name in names:
                await found.start(name)
            await until(lambda: all(found.is_live(name) for name in names))
            yield found
        finally:
            for name in list(found.processes):
                await found.end(name, signal.SIGKILL)
