r"""How fast one conductor decides, and what its prefix index takes.

    .venv/bin/python ops/bench/conductor.py                           # a table
    .venv/bin/python ops/bench/conductor.py --out ops/bench/results   # and files

Half of the workers prefill and half decode, on half as many hosts, each with a store.
Blocks are chains of 24 that begin with one of a few shared prefixes, which many stores
hold. A decision is everything that the dispatcher does for an ``Admit``: lookup, scoring
all candidates, explanation, booking, orders for copies; between two decisions a worker's
beat is taken (not timed with it) and an earlier request ends. One core, one thread.
Bytes a block are those by which the process grew: read them where blocks are many, and
in the first table, for later sizes use what earlier ones have given back.

Writes conductor.json (figures, machine) and conductor.svg (growth).
"""

import argparse
import gc
import hashlib
import json
import platform
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtide.bus.messages import (
    Admit,
    Beat,
    DecodeLoad,
    GatewayLoad,
    Load,
    NodeState,
    Outcome,
    PrefillLoad,
    RequestEnded,
    StoreLoad,
)
from kvtide.conductor.commands import Reply
from kvtide.conductor.dispatcher import Dispatcher
from kvtide.conductor.events import (
    AdmitAsked,
    BlocksMoved,
    EndHeard,
    MemberSeen,
    ReplyTo,
    StoreExact,
    Tick,
)
from kvtide.kv import (
    BlockKey,
    Located,
    ModelFacts,
    NodeId,
    NodeRef,
    RequestId,
    Role,
    SlotRef,
    TenantId,
    Tier,
)
from kvtide.runtime.heap import settle_heap

CHAIN = 24
SHARED = 8
COPIES = 2
FACTS = ModelFacts(
    name="llama3-70b",
    digest="d",
    layers=80,
    kv_heads=8,
    head_dim=128,
    kv_dtype="bfloat16",
    vocab_size=128_256,
    max_tokens=131_072,
    eos_token_ids=(0,),
    numerics="bench",
    block_tokens=512,
)
GATEWAY = NodeRef(NodeId("gateway"), 1)


@dataclass(frozen=True, slots=True)
class Figure:
    """One size of cluster and index."""

    workers: int
    blocks: int
    copies: int
    decisions: int
    mean_us: float
    p50_us: float
    p99_us: float
    most_us: float
    per_s: float
    beat_us: float
    bytes_per_block: float


def rss_bytes() -> int:
    """What this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def beat(name: str, role: Role, host: str, load: Load, seq: int = 1) -> Beat:
    """A node's sign of life."""
    return Beat(
        node=NodeRef(NodeId(name), 1),
        roles=(role,),
        seq=seq,
        host=host,
        state=NodeState.READY,
        steps=seq,
        load=(load,),
        models=(FACTS,) if role in {Role.PREFILL, Role.DECODE} else (),
        worker_class="h",
    )


class Bench:
    """A dispatcher with a cluster around it."""

    def __init__(self, workers: int, blocks: int) -> None:
        """Fill it."""
        self.random = random.Random(7)
        self.dispatcher = Dispatcher(NodeRef(NodeId("conductor"), 1))
        self.now_s = 1000.0
        self.asked = 0
        self.each = workers // 2
        self.stores = [NodeRef(NodeId(f"store-{n}"), 1) for n in range(self.each)]
        gateway = beat("gateway", Role.GATEWAY, "host-g", GatewayLoad(open_requests=1))
        self.handle(MemberSeen(gateway))
        for number in range(self.each):
            host = f"host-{number}"
            store = beat(f"store-{number}", Role.STORE, host, StoreLoad())
            self.handle(MemberSeen(store))
            self.worker_beats(number)
        gc.collect()
        before = rss_bytes()
        self.chains = self.fill(blocks)
        gc.collect()
        self.bytes = rss_bytes() - before
        # as each role does once it has built up what it stands on
        settle_heap()

    def handle(self, event: object) -> list[object]:
        """One event."""
        return [*self.dispatcher.handle(event, self.now_s)]  # type: ignore[arg-type]

    def worker_beats(self, number: int) -> None:
        """Both workers of a host say how they are."""
        host, seq = f"host-{number}", int(self.now_s * 2)
        prefill = PrefillLoad(
            queued_tokens=self.random.randrange(60_000), tokens_per_s=20_000.0
        )
        decode = DecodeLoad(
            running=self.random.randrange(60),
            kv_tokens_used=self.random.randrange(700_000),
            kv_tokens_capacity=1_000_000,
            step_ms=self.random.uniform(25, 60),
        )
        for name, role, load in (
            (f"prefill-{number}", Role.PREFILL, prefill),
            (f"decode-{number}", Role.DECODE, decode),
        ):
            self.handle(MemberSeen(beat(name, role, host, load, seq)))

    def fill(self, blocks: int) -> list[tuple[int, int]]:
        """Chains (seed of the shared part, of the own part), two copies of each block."""
        chains: list[tuple[int, int]] = []
        made = 0
        while made < blocks:
            chain = (self.random.randrange(20), len(chains))
            keys = chain_keys(*chain)
            own = self.random.sample(self.stores, min(COPIES, len(self.stores)))
            for store in own:
                located = [copy_of(key, store) for key in keys]
                self.handle(BlocksMoved(store, located, ()))
            chains.append(chain)
            made += CHAIN - SHARED
        for store in self.stores:
            self.handle(StoreExact(store.node, exact=True))
        return chains

    def admit(self) -> Admit:
        """Half repeat a chain to its end, half share only its beginning."""
        shared, own = self.random.choice(self.chains)
        if self.random.random() < 0.5:  # noqa: PLR2004
            own = -self.random.randrange(1 << 40) - 1
        self.asked += 1
        return Admit(
            request=RequestId(f"r{self.asked}"),
            attempt=0,
            gateway=GATEWAY,
            tenant=TenantId("t"),
            model=FACTS.name,
            keys=chain_keys(shared, own),
            prompt_tokens=CHAIN * FACTS.block_tokens + 100,
            max_new_tokens=500,
        )

    def decisions(self, count: int) -> tuple[list[float], float]:
        """Seconds of each decision, and the mean of a beat."""
        times: list[float] = []
        beats_s = 0.0
        for number in range(count):
            self.now_s += 0.001
            question = AdmitAsked(self.admit(), ReplyTo(number))
            began = time.perf_counter()
            commands = self.handle(question)
            times.append(time.perf_counter() - began)
            if not isinstance(commands[0], Reply):
                sys.exit("no answer")
            began = time.perf_counter()
            self.worker_beats(self.random.randrange(self.each))
            beats_s += (time.perf_counter() - began) / 2
            if number >= 200:  # noqa: PLR2004
                self.handle(EndHeard(ended(f"r{self.asked - 200}")))
            if number % 500 == 0:
                self.handle(Tick())
        return times, beats_s / count


def chain_keys(shared: int, own: int) -> tuple[BlockKey, ...]:
    """Keys as BLAKE3 makes them: equally spread."""
    names = [f"shared {shared} {n}" for n in range(SHARED)]
    names += [f"own {shared} {own} {n}" for n in range(CHAIN - SHARED)]
    return tuple(
        BlockKey(hashlib.blake2b(name.encode(), digest_size=16).digest())
        for name in names
    )


def copy_of(key: BlockKey, store: NodeRef) -> Located:
    """A copy somewhere in a store's arena."""
    size = 160 << 20
    slot = SlotRef(store.node, 1, Tier.DRAM, 0, key[0] * size, size, key[1] + 1)
    return Located(key, slot, 1)


def ended(request: str) -> RequestEnded:
    """A request's end."""
    return RequestEnded(
        request=RequestId(request),
        attempt=0,
        gateway=GATEWAY,
        tenant=TenantId("t"),
        model=FACTS.name,
        outcome=Outcome.FINISHED,
        code="stop",
        prompt_tokens=CHAIN * FACTS.block_tokens,
        cached_tokens=0,
        output_tokens=200,
        ttft_ms=900.0,
        total_ms=9000.0,
        tbt_ms=40.0,
    )


def measure(workers: int, blocks: int, decisions: int) -> Figure:
    """One size; the first decisions aren't counted."""
    bench = Bench(workers, blocks)
    bench.decisions(100)
    gc.collect()
    gc.freeze()
    times, beat_s = bench.decisions(decisions)
    gc.unfreeze()
    order = sorted(times)
    load = bench.dispatcher.load()
    return Figure(
        workers=workers,
        blocks=load.indexed_blocks,
        copies=COPIES,
        decisions=decisions,
        mean_us=sum(times) / len(times) * 1e6,
        p50_us=order[len(order) // 2] * 1e6,
        p99_us=order[int(len(order) * 0.99)] * 1e6,
        most_us=order[-1] * 1e6,
        per_s=len(times) / sum(times),
        beat_us=beat_s * 1e6,
        bytes_per_block=bench.bytes / load.indexed_blocks,
    )


def table(figures: list[Figure]) -> str:
    """For a terminal."""
    head = (
        "| workers | blocks | mean µs | p50 µs | p99 µs | most µs | decisions/s "
        "| beat µs | bytes/block |"
    )
    rows = [head, "|" + "---:|" * 9]
    rows += [
        f"| {f.workers} | {f.blocks} | {f.mean_us:.0f} | {f.p50_us:.0f} | "
        f"{f.p99_us:.0f} | {f.most_us:.0f} | {f.per_s:.0f} | {f.beat_us:.0f} | "
        f"{f.bytes_per_block:.0f} |"
        for f in figures
    ]
    return "\n".join(rows)


def svg(by_workers: list[Figure], by_blocks: list[Figure]) -> str:
    """p50 and p99 over workers, and over blocks; both scales logarithmic in x."""
    most = max(f.p99_us for f in (*by_workers, *by_blocks)) * 1.1
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 300">',
        "<style>text { font: 12px sans-serif }</style>",
        '<rect width="760" height="300" fill="white"/>',
    ]
    panels = (
        (60, "workers", by_workers, [f.workers for f in by_workers]),
        (430, "blocks", by_blocks, [f.blocks for f in by_blocks]),
    )
    for left, name, figures, sizes in panels:
        parts.append(
            f'<text x="{left + 140}" y="290" text-anchor="middle">{name}</text>'
            f'<path d="M{left} 30V250H{left + 290}" fill="none" stroke="black"/>'
        )
        step = 270 / max(1, len(figures) - 1)
        for color, key in (("#1f77b4", "p50_us"), ("#d62728", "p99_us")):
            values = [float(getattr(f, key)) for f in figures]
            points = [
                (left + 10 + n * step, 250 - value / most * 215)
                for n, value in enumerate(values)
            ]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{color}"/>')
            parts += [
                f'<text x="{x:.1f}" y="{y - 6:.1f}" text-anchor="middle" '
                f'fill="{color}">{value:.0f}</text>'
                for (x, y), value in zip(points, values, strict=True)
            ]
        parts += [
            f'<text x="{left + 10 + n * step:.1f}" y="268" text-anchor="middle">'
            f"{size:,}</text>"
            for n, size in enumerate(sizes)
        ]
    parts.append(
        '<text x="60" y="20">decision, µs: <tspan fill="#1f77b4">p50</tspan>, '
        '<tspan fill="#d62728">p99</tspan></text></svg>'
    )
    return "\n".join(parts)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the files")
    parser.add_argument("--decisions", type=int, default=3000)
    parser.add_argument("--workers", type=int, nargs="*", default=[10, 100, 300, 1000])
    parser.add_argument(
        "--blocks", type=int, nargs="*", default=[10_000, 100_000, 1_000_000]
    )
    options = parser.parse_args()
    most_blocks, most_workers = max(options.blocks), max(options.workers)
    by_blocks = [
        measure(most_workers, blocks, options.decisions) for blocks in options.blocks
    ]
    small = min(options.blocks)
    by_workers = [
        measure(workers, small, options.decisions) for workers in options.workers
    ]
    print(f"{most_workers} workers, growth with blocks:\n{table(by_blocks)}\n")
    print(f"{small} blocks, growth with workers:\n{table(by_workers)}")
    if options.out is None:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    report = {
        "machine": {
            "python": platform.python_version(),
            "processor": platform.processor() or platform.machine(),
            "system": platform.system(),
        },
        "most": {"workers": most_workers, "blocks": most_blocks},
        "by_blocks": [asdict(figure) for figure in by_blocks],
        "by_workers": [asdict(figure) for figure in by_workers],
    }
    text = json.dumps(report, indent=2) + "\n"
    (options.out / "conductor.json").write_text(text)
    (options.out / "conductor.svg").write_text(svg(by_workers, by_blocks) + "\n")


if __name__ == "__main__":
    main()
