"""What reuse, overlap and hand-over cost between real workers, a store and a bus.

``PYTHONPATH=. python ops/bench/worker.py [reuse] [overlap] [handover]`` (default: all)
starts them on this machine with the demo model, and writes ``ops/bench/results/worker_NAME``
as JSON and as a table. About two minutes each.
"""

import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch
from tests.integration.cluster import Cluster
from tests.integration.pretended_gateway import Asked, PretendedGateway
from typing_extensions import override

from kvtide.bus import open_node
from kvtide.bus.messages import DecodeTimes, PrefillDone, PrefillLoad, StoreLoad, Tokens
from kvtide.kv import Located, NodeId, Role, Tier
from kvtide.runtime import SystemClock
from kvtide.runtime.metrics import new_registry
from kvtide.runtime.settings import RoleSettings
from kvtide.transfer.bench_report import this_machine

RESULTS = Path(__file__).parent / "results"
PROCESS = Path(__file__).with_name("worker_process.py")
BLOCK = 64
VOCAB = 49_000


@dataclass(frozen=True, slots=True)
class Timed:
    """One request, in milliseconds from when it was sent.

    ``load_ms`` and ``compute_ms`` are prefill's own words; ``prefill_ms`` is when its
    last word came, ``pull_ms`` how long decode pulled (from its start, beside prefill),
    ``first_step_ms`` its first step. ``handover_ms`` is from prefill's last layer to the
    begin of decode's first step, where prefill computed something.
    """

    what: str
    ttft_ms: float
    lookup_ms: float
    queue_ms: float
    load_ms: float
    compute_ms: float
    prefill_ms: float
    pull_ms: float
    first_step_ms: float
    handover_ms: float
    reused_tokens: int


@dataclass(slots=True)
class Marks:
    """The lines that a worker's process has written."""

    path: Path

    def after(self, what: str, at_s: float) -> list[float]:
        """When it happened, later than ``at_s``."""
        pairs = (line.split() for line in self.path.read_text().splitlines())
        return [float(at) for name, at in pairs if name == what and float(at) > at_s]


class TimingGateway(PretendedGateway):
    """Notes when the first token and prefill's last word came."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.first_s: dict[str, float] = {}
        self.times: dict[str, DecodeTimes] = {}

    @override
    async def _tokens(self, tokens: Tokens) -> None:
        if tokens.request not in self.first_s and tokens.times is not None:
            self.first_s[tokens.request] = now_s()
            self.times[tokens.request] = tokens.times
        await super()._tokens(tokens)


def now_s() -> float:
    """The clock that the workers' marks are made with."""
    return time.monotonic()  # noqa: TID251 - one host


@dataclass(slots=True)
class Rig:
    """A store, one worker of each role, and a gateway in this process."""

    cluster: Cluster
    gateway: TimingGateway
    folder: Path
    noise: random.Random = field(default_factory=lambda: random.Random(5))

    def text(self, tokens: int) -> list[int]:
        """A prompt that nobody has seen."""
        return [self.noise.randrange(10, VOCAB) for _ in range(tokens)]

    def link(self, bytes_per_s: float) -> None:
        """How fast prefill reads from the pool; 0: as fast as it can."""
        (self.folder / "link").write_text(str(bytes_per_s))

    async def ask(self, what: str, prompt: Sequence[int], blocks: int = 0) -> Timed:
        """Have two tokens made, with the first ``blocks`` blocks from the pool."""
        sent_s = now_s()
        reuse: tuple[Located, ...] = ()
        if blocks:
            reuse = (await self.gateway.located(prompt, "store-0"))[:blocks]
            assert len(reuse) == blocks, f"{len(reuse)} of {blocks} blocks are there"
        looked_up_s = now_s()
        asked = await self.gateway.send(prompt, 2, reuse=reuse)
        await self.gateway.finished(asked)
        await self.gateway.until(asked, lambda: asked.prefill_done)
        return self._timed(what, asked, sent_s, looked_up_s)

    def _timed(self, what: str, asked: Asked, sent_s: float, found_s: float) -> Timed:
        done, name = asked.prefill_done, asked.ref.request
        assert isinstance(done, PrefillDone)
        first_s, times = self.gateway.first_s[name], self.gateway.times[name]
        layers = Marks(self.folder / "prefill.marks").after("layer", sent_s)
        steps = Marks(self.folder / "decode.marks").after("step", sent_s)
        handover_ms = (steps[0] - layers[-1]) * 1000 if layers else 0.0
        return Timed(
            what=what,
            ttft_ms=(first_s - sent_s) * 1000,
            lookup_ms=(found_s - sent_s) * 1000,
            queue_ms=done.times.queue_ms,
            load_ms=done.times.load_ms,
            compute_ms=done.times.compute_ms,
            prefill_ms=done.times.queue_ms + done.times.load_ms + done.times.compute_ms,
            pull_ms=times.pull_ms,
            first_step_ms=times.first_step_ms,
            handover_ms=handover_ms,
            reused_tokens=done.reused_tokens,
        )

    async def pooled(self, prompt: Sequence[int], tier: Tier | None = None) -> int:
        """Wait until all full blocks are in the pool (in this tier); how many."""
        blocks = len(prompt) // BLOCK
        async with asyncio.timeout(60):
            while True:
                found = await self.gateway.pooled(prompt, blocks)
                if tier is None or all(one.slot.tier is tier for one in found):
                    return blocks
                await asyncio.sleep(0.1)

    async def only_on_ssd(self, prompt: Sequence[int]) -> None:
        """Kill the store when the prompt is on its SSD, and start it again."""
        blocks = len(prompt) // BLOCK
        await self._until_store(lambda load: load.ssd_blocks >= blocks)
        self.cluster.kill("store-0")
        await self.gateway.gone("store-0")
        self.cluster.restart("store-0")
        for name in ("store-0", "prefill-0", "decode-0"):
            await self.gateway.member(name)
        await self.pooled(prompt, Tier.SSD)

    async def _until_store(self, holds: Callable[[StoreLoad], bool]) -> None:
        async with asyncio.timeout(60):
            while True:
                member = self.gateway.node.roster.get(NodeId("store-0"))
                load = member.beat.load[0] if member and member.beat.load else None
                if isinstance(load, StoreLoad) and holds(load):
                    return
                await asyncio.sleep(0.1)

    async def reported_loads(self) -> int:
        """Loads of single copies that prefill has reported, as cost models need them."""
        member = await self.gateway.member("prefill-0")
        loads = [one for one in member.beat.load if isinstance(one, PrefillLoad)]
        return sum(one.loads for one in loads if one.load is not None)


@asynccontextmanager
async def rig(folder: Path, *, ssd: bool) -> AsyncGenerator[Rig]:
    """All of it, ready; with ``ssd`` the store moves everything there soon."""
    store: dict[str, object] = {"dram_bytes": 700 << 20}
    if ssd:
        store |= {
            "ssd_bytes": 2 << 30,
            "ssd_dir": str(folder / "ssd"),
            "ssd_flush_s": 0.2,
            "dram_high": 0.05,
            "dram_low": 0.01,
        }
    cluster = Cluster(folder, prefill=0, decode=0, settings={"store": store})
    (folder / "link").write_text("0")
    started: list[subprocess.Popen[bytes]] = []
    with cluster:
        settings = RoleSettings(
            nats=cluster.nats.url,
            node="gateway-bench",
            state_dir=cluster.state_dir,
            shm_dir=cluster.shm_dir(),
        )
        try:
            started.extend(
                _worker(role, settings, folder) for role in ("prefill", "decode")
            )
            async with open_node(
                settings,
                (Role.GATEWAY,),
                clock=SystemClock(),
                registry=new_registry(role="gateway", node="gateway-bench"),
            ) as node:
                gateway = TimingGateway(node)
                await gateway.start()
                for name in ("store-0", "prefill-0", "decode-0"):
                    await gateway.member(name)
                yield Rig(cluster, gateway, folder)
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait(30)


def _worker(role: str, gateway: RoleSettings, folder: Path) -> subprocess.Popen[bytes]:
    given = {
        "nats": gateway.nats,
        "node": f"{role}-0",
        "state_dir": str(gateway.state_dir),
        "shm_dir": str(gateway.shm_dir),
        "http_port": 0,
        "drain_s": 0.0,
        "chunk_tokens": 4096,
        "step_target_ms": 60_000.0,
    }
    if role == "decode":
        del given["chunk_tokens"], given["step_target_ms"]
    with (folder / f"{role}.log").open("wb") as log:
        return subprocess.Popen(  # noqa: S603 - our own arguments
            [sys.executable, str(PROCESS), role, json.dumps(given), str(folder)],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},  # noqa: TID251 - a process's
        )


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure that is held against a bound."""

    what: str
    value: float
    bound: float

    @property
    def verdict(self) -> str:
        """In words."""
        return "met" if self.value <= self.bound else "MISSED"


Report = tuple[list[Timed], list[Bar]]


async def reuse(bench: Rig) -> Report:
    """A prefix of 4,000 tokens: computed, from DRAM, from SSD; 16 more are new."""
    rows: list[Timed] = []
    await bench.ask("warm-up", bench.text(200))
    for _ in range(2):
        prefix = bench.text(4000)
        rows.append(await bench.ask("computed", prefix + bench.text(16)))
        blocks = await bench.pooled(prefix)
        rows += [
            await bench.ask("from DRAM", prefix + bench.text(16), blocks)
            for _ in range(3)
        ]
        await bench.only_on_ssd(prefix)
        rows.append(await bench.ask("from SSD", prefix + bench.text(16), blocks))
    computed = middle(rows, "computed")
    loads = await bench.reported_loads()
    return rows, [
        Bar("from DRAM, of computing", middle(rows, "from DRAM") / computed, 0.1),
        Bar("from SSD, of computing", middle(rows, "from SSD") / computed, 0.2),
        Bar("loads that prefill did not report", 0.0 if loads else 1.0, 0.0),
    ]


async def overlap(bench: Rig) -> Report:
    """31 blocks over a slow link beside 512 tokens that are computed.

    The worker may compute some of the blocks instead of loading them, also where they
    are loaded alone: that load is scaled up to all of them.
    """
    rows: list[Timed] = []
    await bench.ask("warm-up", bench.text(200))
    prefix = bench.text(31 * BLOCK)
    await bench.ask("warm-up", prefix + bench.text(1))
    blocks = await bench.pooled(prefix)
    rows += [
        await bench.ask("compute alone", prefix + bench.text(512), blocks)
        for _ in range(3)
    ]
    alone_ms = median(row.compute_ms for row in rows)
    size = blocks * BLOCK * 2 * 3 * 64 * 4 * 30
    bench.link(size / alone_ms * 1000)
    for _ in range(3):
        rows.append(await bench.ask("load alone", prefix + bench.text(17), blocks))
        rows.append(await bench.ask("both", prefix + bench.text(512), blocks))
    load_ms = median(
        row.load_ms * blocks * BLOCK / row.reused_tokens
        for row in rows
        if row.what == "load alone"
    )
    both = [row for row in rows if row.what == "both"]
    total_ms = median(row.ttft_ms - row.lookup_ms - row.first_step_ms for row in both)
    larger = max(load_ms, alone_ms)
    return rows, [Bar("both, of the larger alone", total_ms / larger, 1.25)]


async def handover(bench: Rig) -> Report:
    """From prefill's last layer to decode's first step, of 2,000 tokens and of one."""
    rows: list[Timed] = []
    await bench.ask("warm-up", bench.text(200))
    for _ in range(7):
        rows.append(await bench.ask("2,000 new tokens", bench.text(2001)))
        rows += [await bench.ask("one new token", bench.text(2)) for _ in range(2)]
    long = median(row.handover_ms for row in rows if row.what == "2,000 new tokens")
    short = median(row.handover_ms for row in rows if row.what == "one new token")
    return rows, [Bar("ms more for 2,000 tokens than for one", long - short, 15.0)]


def middle(rows: Sequence[Timed], what: str) -> float:
    """The median time to the first token."""
    return median(row.ttft_ms for row in rows if row.what == what)


def write(name: str, report: Report, command: str) -> None:
    """JSON and a table, with the machine and versions."""
    rows, bars = report
    machine = asdict(this_machine())
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    about = {"command": command, "machine": machine, "versions": versions}
    found = [{**asdict(bar), "verdict": bar.verdict} for bar in bars]
    whole = {**about, "bars": found, "requests": [asdict(row) for row in rows]}
    (RESULTS / f"worker_{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    names = [name for name in asdict(rows[0]) if name != "what"]
    about_it = (
        f"{machine['cpu']}, {machine['cores']} cores; torch {versions['torch']}, "
        f"Python {versions['python']}; medians of each kind."
    )
    lines = [
        f"# `{command}`",
        "",
        about_it,
        "",
        f"| request | number | {' | '.join(names)} |",
        "| --- " * (len(names) + 2) + "|",
    ]
    for what in dict.fromkeys(row.what for row in rows):
        same = [asdict(row) for row in rows if row.what == what]
        figures = [f"{median(row[name] for row in same):,.1f}" for name in names]
        lines.append(f"| {what} | {len(same)} | {' | '.join(figures)} |")
    lines += ["", "| what | value | bar | |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {bar.what} | {bar.value:.3f} | at most {bar.bound:g} | {bar.verdict} |"
        for bar in bars
    ]
    text = "\n".join(lines) + "\n"
    (RESULTS / f"worker_{name}.md").write_text(text)
    print(text)


BENCHES: dict[str, Callable[[Rig], Awaitable[Report]]] = {
    "reuse": reuse,
    "overlap": overlap,
    "handover": handover,
}


async def main(names: Sequence[str]) -> None:
    """Run these, each with workers of its own."""
    for name in names:
        with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as folder:
            async with rig(Path(folder), ssd=name == "reuse") as bench:
                report = await BENCHES[name](bench)
        write(name, report, f"PYTHONPATH=. python ops/bench/worker.py {name}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or list(BENCHES)))
