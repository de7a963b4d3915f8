r"""Real conductors on a real NATS server: admissions a second, a kill, and a restart.

    .venv/bin/python ops/bench/conductor_processes.py
    .venv/bin/python ops/bench/conductor_processes.py --out ops/bench/results

Two conductors run in processes of their own. This process pretends to be a store with
``--blocks`` blocks, prefill and decode workers, and a gateway. It

1. waits until both conductors know all blocks,
2. asks for ``--rate`` placements a second at set times, of each conductor half of them,
   whatever the answers take (open loop; a time is that from when a question was due to
   its answer), tells how each request ended, and counts what was not answered,
3. kills one with SIGKILL under a fifth of that load: a question without an answer goes
   to the other one after 250 ms, as a gateway's does; none may be lost,
4. starts it again and takes the time from the start of its process, and from its first
   beat, until it says that it knows all blocks exactly.

Writes conductor_processes.json.
"""

import argparse
import asyncio
import hashlib
import json
import logging
import os
import platform
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import structlog

from kvtide.bus import BusError, Hop, Identity, Incoming, NatsBus, Node
from kvtide.bus.messages import (
    Admit,
    DecodeLoad,
    Message,
    NodeState,
    Outcome,
    Placed,
    PrefillLoad,
    RequestEnded,
    SnapshotPage,
    SnapshotPull,
    StatusQuery,
    StatusReply,
    StoreLoad,
)
from kvtide.cli.supervisor.nats_server import find_nats_server
from kvtide.kv import (
    BlockKey,
    Located,
    ModelFacts,
    NodeId,
    RequestId,
    Role,
    SlotRef,
    TenantId,
    Tier,
)
from kvtide.runtime import SystemClock

CLOCK = SystemClock()
CHAIN = 24
LIMIT_S = 120.0
PATIENCE_S = 0.25
CALM_S = 5.0
FACTS = ModelFacts(
    name="bench",
    digest="d" * 64,
    layers=32,
    kv_heads=8,
    head_dim=128,
    kv_dtype="float16",
    vocab_size=128_256,
    max_tokens=131_072,
    eos_token_ids=(0,),
    numerics="bench",
)
NAMES = ("conductor-0", "conductor-1")
Figures: TypeAlias = dict[str, dict[str, float]]


@dataclass
class Site:
    """The cluster: its server, its conductors, and who this process pretends to be."""

    url: str
    folder: Path
    gateway: Node
    store: Node
    keys: list[BlockKey]
    processes: dict[str, asyncio.subprocess.Process] = field(
        default_factory=dict[str, asyncio.subprocess.Process]
    )

    async def start(self, name: str) -> None:
        """A conductor's process; returns at once."""
        self.processes[name] = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvtide.cli", "conductor", "--node", name),
            *("--nats", self.url, "--state-dir", str(self.folder / name)),
            *("--http-port", "0", "--log-level", "warning"),
        )

    async def kill(self, name: str) -> None:
        """SIGKILL."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        await process.wait()

    async def exact(self, name: str) -> None:
        """Until it says that it knows every block, and every worker."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                status = await self._status(name)
                if status is not None and status.exact:
                    live = sum(1 for view in status.nodes if view.beat.models)
                    if status.indexed_copies == len(self.keys) and live >= 2:  # noqa: PLR2004
                        return
                await CLOCK.sleep(0.02)

    async def _status(self, name: str) -> StatusReply | None:
        inbox = self.gateway.subjects.inbox(Role.CONDUCTOR, NodeId(name), Hop.QUERY)
        try:
            answer = await self.gateway.bus.request(inbox, StatusQuery(), timeout_s=1)
        except BusError:
            return None
        return answer if isinstance(answer, StatusReply) else None

    def admit(self, number: int) -> Admit:
        """Of a prompt whose first blocks, up to all of them, are there."""
        first = number * CHAIN % max(1, len(self.keys) - CHAIN)
        cached = number % (CHAIN + 1)
        keys = self.keys[first : first + cached]
        keys += [block_key(f"new {number} {n}") for n in range(CHAIN - cached)]
        return Admit(
            request=RequestId(f"bench-{number}"),
            attempt=0,
            gateway=self.gateway.ref,
            tenant=TenantId("t"),
            model=FACTS.name,
            keys=tuple(keys),
            prompt_tokens=CHAIN * FACTS.block_tokens + 10,
            max_new_tokens=200,
        )

    def ended(self, number: int) -> RequestEnded:
        """That request's end."""
        return RequestEnded(
            request=RequestId(f"bench-{number}"),
            attempt=0,
            gateway=self.gateway.ref,
            tenant=TenantId("t"),
            model=FACTS.name,
            outcome=Outcome.FINISHED,
            code="stop",
            prompt_tokens=CHAIN * FACTS.block_tokens + 10,
            cached_tokens=0,
            output_tokens=20,
            ttft_ms=50.0,
            total_ms=500.0,
        )


@dataclass
class Asked:
    """What came of a load."""

    answered_ms: list[float] = field(default_factory=list[float])
    lost: int = 0

    def figures(self, seconds: float) -> dict[str, float]:
        """For people."""
        order = sorted(self.answered_ms) or [0.0]
        return {
            "answered": len(self.answered_ms),
            "lost": self.lost,
            "per_s": round(len(self.answered_ms) / seconds, 1),
            "p50_ms": round(order[len(order) // 2], 2),
            "p99_ms": round(order[int(len(order) * 0.99)], 2),
            "most_ms": round(order[-1], 2),
        }


class Load:
    """Asks at set times; numbers its requests on from one load to the next."""

    def __init__(self, site: Site) -> None:
        """Nothing is asked before ``run``."""
        self._site = site
        self._number = 0

    async def run(self, rate: float, seconds: float, patience_s: float) -> Asked:
        """``rate`` a second; who does not answer for so long is followed by the other."""
        asked = Asked()
        began_s = CLOCK.monotonic()
        async with asyncio.TaskGroup() as group:
            for count in range(int(rate * seconds)):
                due_s = began_s + count / rate
                await CLOCK.sleep(max(0.0, due_s - CLOCK.monotonic()))
                self._number += 1
                group.create_task(self._one(self._number, due_s, patience_s, asked))
        return asked

    async def _one(
        self, number: int, due_s: float, patience_s: float, asked: Asked
    ) -> None:
        site, node = self._site, self._site.gateway
        question = site.admit(number)
        for rank in range(20):
            name = NodeId(NAMES[(number + rank) % len(NAMES)])
            inbox = node.subjects.inbox(Role.CONDUCTOR, name, Hop.ADMIT)
            try:
                answer = await node.bus.request(inbox, question, timeout_s=patience_s)
            except BusError:
                continue
            if isinstance(answer, Placed):
                asked.answered_ms.append((CLOCK.monotonic() - due_s) * 1000)
                await CLOCK.sleep(0.2)
                ended = site.ended(number)
                await node.bus.publish(node.subjects.ended(node.ref.node), ended)
                return
            break
        asked.lost += 1


def block_key(name: str) -> BlockKey:
    """Equally spread, as BLAKE3's are."""
    return BlockKey(hashlib.blake2b(name.encode(), digest_size=16).digest())


@asynccontextmanager
async def node_on(url: str, name: str, role: Role) -> AsyncGenerator[Node]:
    """A node with a connection of its own."""
    identity = Identity(NodeId(name), epoch=1)
    async with (
        await NatsBus.open(url, identity, cluster="local", clock=CLOCK) as bus,
        Node(
            roles=(role,), bus=bus, identity=identity, clock=CLOCK, secret=b"s" * 32
        ) as node,
    ):
        yield node


async def be_store(node: Node, keys: Sequence[BlockKey]) -> None:
    """Answer pulls with pages of these blocks."""
    size = FACTS.block_tokens * 2 * 32 * 8 * 128 * 2
    copies = {
        key: Located(
            key, SlotRef(node.ref.node, 1, Tier.DRAM, 0, n * size, size, n + 1), 1
        )
        for n, key in enumerate(keys)
    }
    order = sorted(copies)
    after = {key: n + 1 for n, key in enumerate(order)}

    async def on_pull(incoming: Incoming) -> Message | None:
        pull = incoming.message
        if not isinstance(pull, SnapshotPull):
            return None
        start = 0 if pull.after is None else after[pull.after]
        page = order[start : start + pull.limit]
        return SnapshotPage(
            store=node.ref,
            seq=1,
            located=tuple(copies[key] for key in page),
            next_key=page[-1] if start + len(page) < len(order) else None,
        )

    await node.inbox(Role.STORE, Hop.QUERY, on_pull)
    node.report(StoreLoad(seq=1, used_slots=len(order)))
    node.set_state(NodeState.READY)


@asynccontextmanager
async def nats() -> AsyncGenerator[str]:
    """A server on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = await asyncio.create_subprocess_exec(
        *(str(find_nats_server()), "--addr", "127.0.0.1", "--port", str(port)),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await CLOCK.sleep(0.05)
                    continue
                writer.close()
                break
        yield f"nats://127.0.0.1:{port}"
    finally:
        server.terminate()
        await server.wait()


@asynccontextmanager
async def site(folder: Path, blocks: int, workers: int) -> AsyncGenerator[Site]:
    """Everything but the conductors; those that run at the end are killed."""
    keys = [block_key(f"block {n}") for n in range(blocks)]
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        url = await enter(nats())
        for number in range(workers):
            for role, load in (
                (Role.PREFILL, PrefillLoad(tokens_per_s=5000.0)),
                (Role.DECODE, DecodeLoad(kv_tokens_capacity=1_000_000, step_ms=30.0)),
            ):
                node = await enter(node_on(url, f"{role}-{number}", role))
                node.models(FACTS)
                node.report(load)
                node.set_state(NodeState.READY)
        store = await enter(node_on(url, "store-0", Role.STORE))
        await be_store(store, keys)
        gateway = await enter(node_on(url, "gateway-0", Role.GATEWAY))
        gateway.set_state(NodeState.READY)
        found = Site(url, folder, gateway, store, keys)
        try:
            yield found
        finally:
            for name in list(found.processes):
                await found.kill(name)


async def measure(options: argparse.Namespace) -> Figures:
    """All four steps."""
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as name:
        async with site(Path(name), options.blocks, options.workers) as found:
            for each in NAMES:
                await found.start(each)
            for each in NAMES:
                await found.exact(each)
            load = Load(found)
            await load.run(options.rate / 5, 2.0, CALM_S)
            steady = await load.run(options.rate, options.seconds, CALM_S)
            figures["admissions"] = steady.figures(options.seconds)
            async with asyncio.TaskGroup() as group:
                loaded = group.create_task(load.run(options.rate / 5, 6.0, PATIENCE_S))
                await CLOCK.sleep(2.0)
                await found.kill(NAMES[0])
            figures["killed"] = loaded.result().figures(6.0)
            figures["restart"] = await restart(found)
    return figures


async def restart(found: Site) -> dict[str, float]:
    """Seconds until the restarted conductor knows all blocks exactly."""
    before = found.gateway.roster.epoch(NodeId(NAMES[0]))
    began_s = CLOCK.monotonic()
    await found.start(NAMES[0])
    async with asyncio.timeout(LIMIT_S):
        while found.gateway.roster.epoch(NodeId(NAMES[0])) <= before:
            await CLOCK.sleep(0.01)
    beat_s = CLOCK.monotonic()
    await found.exact(NAMES[0])
    ended_s = CLOCK.monotonic()
    return {
        "blocks": len(found.keys),
        "from_process_start_s": round(ended_s - began_s, 2),
        "from_first_beat_s": round(ended_s - beat_s, 2),
    }


async def until_told(work: Coroutine[object, object, Figures]) -> Figures:
    """Do it; SIGTERM ends it with everything that it started."""
    doing = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, doing.cancel)
    return await doing


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the figures")
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=8, help="of each kind")
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    level = structlog.make_filtering_bound_logger(logging.WARNING)
    structlog.configure(wrapper_class=level)
    figures = asyncio.run(until_told(measure(options)))
    for name, values in figures.items():
        print(name, json.dumps(values))
    if options.out is None:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    machine = {
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }
    report = {"machine": machine, "workers": 2 * options.workers, **figures}
    text = json.dumps(report, indent=2) + "\n"
    (options.out / "conductor_processes.json").write_text(text)


if __name__ == "__main__":
    main()
