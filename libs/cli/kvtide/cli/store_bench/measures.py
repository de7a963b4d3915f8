"""The measurements, each beside what the machine can do, from one run."""

import asyncio
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from xxhash import xxh3_64_intdigest

from kvtide.cli.store_bench.rig import (
    LAYOUT,
    Rig,
    RigError,
    block_keys,
    rig,
    until,
)
from kvtide.runtime import SystemClock

BLOCKS = 64
BATCH = 8
PROMPT = 32
"""Blocks of a prompt of 2,048 tokens, which a prefill worker puts as one batch."""
ROUNDS = 5
RELEASE_S = 0.2
SSD_BLOCKS = 96
SSD_THREADS = 4
SSD_READERS = 2
"""Requests at a time, each with a batch: one alone leaves the disk idle while it copies."""
INDEX_SIZES = (10_000, 100_000, 1_000_000)
INDEX_LIMIT_S = 600.0
PAYLOAD_BYTES = LAYOUT.parts * LAYOUT.part_bytes


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure. ``ratio`` to ``limit``, as it was in the same run; ``bar``: see docs.

    A bar is the least that the ratio (or, without one, the value) must be; a negative
    one the most.
    """

    name: str
    value: float
    unit: str
    ratio: float | None = None
    limit: str = ""
    bar: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None without one."""
        if self.bar is None:
            return None
        figure = self.value if self.ratio is None else self.ratio
        return figure >= self.bar if self.bar > 0 else figure <= -self.bar


class Timer:
    """Median seconds of several rounds."""

    def __init__(self) -> None:
        """Uses the system's clock."""
        self._clock = SystemClock()

    def time(self, work: Callable[[], object]) -> float:
        """Of one call."""
        started_s = self._clock.monotonic()
        work()
        return self._clock.monotonic() - started_s

    async def wait(self, work: Awaitable[object]) -> float:
        """Of one await."""
        started_s = self._clock.monotonic()
        await work
        return self._clock.monotonic() - started_s


def copy_and_hash(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    """What no verified copy can do without: each part copied, then hashed."""
    size = LAYOUT.part_bytes
    for source, target in zip(sources, targets, strict=True):
        for at in range(0, PAYLOAD_BYTES, size):
            target[at : at + size] = source[at : at + size]
            xxh3_64_intdigest(target[at : at + size])


async def memory_measures(folder: Path, shm_dir: Path) -> list[Measure]:
    """Verified reads and puts in DRAM, beside copying and hashing the same bytes."""
    slots = -(-LAYOUT.slot_bytes // 64) * 64 * (2 * BLOCKS + 64)
    async with rig(folder, shm_dir, dram_bytes=slots, slab_bytes=32 << 20) as made:
        keys = block_keys(BLOCKS)
        data = memoryview(bytearray(os.urandom(LAYOUT.part_bytes)))
        parts = [data] * LAYOUT.parts
        for at in range(0, BLOCKS, BATCH):
            await made.put(keys[at : at + BATCH], parts)
        targets = _targets(BLOCKS)
        sources = _targets(BLOCKS)
        rounds = [
            await _memory_round(made, parts, sources, targets, number)
            for number in range(ROUNDS + 1)
        ]
    # the first round touches memory for the first time
    rounds = rounds[1:]
    copy, read, single, put, prompt = (
        median(each) for each in zip(*rounds, strict=True)
    )
    gib = BLOCKS * PAYLOAD_BYTES / (1 << 30)
    what = "memcpy + xxh3 of the same parts"
    return [
        Measure("memcpy + xxh3", gib / copy, "GiB/s"),
        Measure(
            "verified read, 8 blocks", gib / read, "GiB/s", copy / read, what, 0.85
        ),
        Measure("verified read, one block", gib / single, "GiB/s", copy / single, what),
        Measure("batched put, 8 blocks", gib / put, "GiB/s", copy / put, what),
        Measure(
            "batched put, 32 blocks", gib / prompt, "GiB/s", copy / prompt, what, 0.5
        ),
    ]


async def _memory_round(
    made: Rig,
    parts: Sequence[memoryview],
    sources: Sequence[memoryview],
    targets: Sequence[memoryview],
    number: int,
) -> tuple[float, ...]:
    timer = Timer()
    located = made.located(block_keys(BLOCKS))
    copy_s = timer.time(lambda: copy_and_hash(sources, targets))
    read_s = single_s = 0.0
    for at in range(0, BLOCKS, BATCH):
        batch = slice(at, at + BATCH)
        read_s += await timer.wait(made.read(located[batch], targets[batch]))
    for i in range(BLOCKS):
        single_s += await timer.wait(made.read([located[i]], [targets[i]]))
    puts_s: list[float] = []
    for batch_blocks in (BATCH, PROMPT):
        fresh = block_keys(BLOCKS, 1000 * (number + 1))
        put_s = 0.0
        for at in range(0, BLOCKS, batch_blocks):
            put_s += await timer.wait(made.put(fresh[at : at + batch_blocks], parts))
        puts_s.append(put_s)
        # the release of the last put is on its way
        await asyncio.sleep(RELEASE_S)
        made.forget(fresh)
    return copy_s, read_s, single_s, *puts_s


def _targets(count: int) -> list[memoryview]:
    """Page-aligned memory that has been touched."""
    found: list[memoryview] = []
    for _ in range(count):
        memory = mmap.mmap(-1, PAYLOAD_BYTES)
        view = memoryview(memory)
        view[:] = b"\1" * PAYLOAD_BYTES
        found.append(view)
    return found


async def ssd_measures(folder: Path, shm_dir: Path) -> list[Measure]:
    """Verified reads of blocks on SSD, beside bare direct reads of its files."""
    slot = -(-LAYOUT.slot_bytes // 64) * 64
    dram = 32 * slot
    tier = folder / "ssd"
    settings: dict[str, object] = {
        "dram_bytes": dram,
        "slab_bytes": dram,
        "ssd_dir": tier,
        "ssd_bytes": 4 * SSD_BLOCKS * slot,
        "ssd_segment_bytes": 64 << 20,
        "ssd_write_bytes_per_s": 1e10,
        "ssd_stage_share": 0.6,
        "ssd_promote_hits": 255,
    }
    async with rig(folder, shm_dir, **settings) as made:
        machine = made.store.machine
        if machine is None:
            raise RigError("the store has no life")
        await until(lambda: machine.load().ssd_state == "ready", "the tier is open")
        keys = block_keys(SSD_BLOCKS)
        parts = [memoryview(os.urandom(LAYOUT.part_bytes))] * LAYOUT.parts
        for at in range(0, SSD_BLOCKS, 4):
            await made.put(keys[at : at + 4], parts)
            await until(lambda: not machine.ssd.demotion.wanted(), "blocks are demoted")
        cold = [
            copy
            for key in keys
            if machine.inventory.copy_of(key) is None
            and (copy := machine.ssd.find(key)) is not None
        ]
        if len(cold) < BATCH * SSD_READERS:
            raise RigError(f"only {len(cold)} blocks went to the SSD")
        whole = BATCH * SSD_READERS
        cold = cold[: len(cold) - len(cold) % whole]
        targets = [_targets(BATCH) for _ in range(SSD_READERS)]

        async def read_share(reader: int) -> None:
            for at in range(reader * BATCH, len(cold), whole):
                await made.read(cold[at : at + BATCH], targets[reader])

        async def read_all() -> None:
            async with asyncio.TaskGroup() as readers:
                for reader in range(SSD_READERS):
                    readers.create_task(read_share(reader))

        timer = Timer()
        rounds: list[tuple[float, float]] = []
        for _ in range(3):
            bare_s = timer.time(lambda: _read_direct(tier, len(cold)))
            rounds.append((bare_s, await timer.wait(read_all())))
    bare, read = (median(each) for each in zip(*rounds, strict=True))
    gib = len(cold) * PAYLOAD_BYTES / (1 << 30)
    what = f"O_DIRECT reads of as many bytes, {SSD_THREADS} threads"
    return [
        Measure("bare direct read", gib / bare, "GiB/s"),
        Measure("verified read from SSD", gib / read, "GiB/s", bare / read, what, 0.8),
    ]


def _read_direct(tier: Path, blocks: int) -> None:
    """Read that many blocks' bytes of the tier's files past the page cache."""
    size = -(-LAYOUT.slot_bytes // 4096) * 4096
    places: list[tuple[Path, int]] = []
    for path in sorted(tier.rglob("*")):
        if path.is_file():
            places += [(path, at) for at in range(0, path.stat().st_size - size, size)]
    places = places[:blocks]
    if len(places) < blocks:
        raise RigError("the tier's files are too short to be compared with")

    def read(place: tuple[Path, int]) -> None:
        path, at = place
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, size) as buffer:
                os.preadv(file, [buffer], at)
        finally:
            os.close(file)

    with ThreadPoolExecutor(SSD_THREADS) as threads:
        list(threads.map(read, places))


def index_measures(sizes: Sequence[int] = INDEX_SIZES) -> list[Measure]:
    """What a node keeps of its blocks, and how long looking and evicting take."""
    grown = [_grown(size) for size in sizes]
    last, first = grown[-1], grown[0]
    found = [
        Measure(
            f"index, {last['blocks']:,.0f} blocks",
            last["bytes_per_block"],
            "bytes/block",
            bar=-400.0,
        ),
        Measure(
            "presence queries of one key",
            last["presence_queries_per_s"],
            "1/s",
            bar=100_000.0,
        ),
        Measure("the same, decoded and encoded", last["presence_wired_per_s"], "1/s"),
        Measure("keys in presence queries of 64", last["presence_keys_per_s"], "1/s"),
    ]
    found += [
        Measure(f"eviction, {each['blocks']:,.0f} blocks", each["eviction_us"], "us")
        for each in grown[:-1]
    ]
    ratio = last["eviction_us"] / first["eviction_us"]
    found.append(
        Measure(
            f"eviction, {last['blocks']:,.0f} blocks",
            last["eviction_us"],
            "us",
            ratio,
            f"that at {first['blocks']:,.0f} blocks",
            -3.0,
        )
    )
    return found


def _grown(blocks: int) -> dict[str, float]:
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-m", "kvtide.cli.store_bench.index_growth", str(blocks)],
        capture_output=True,
        timeout=INDEX_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RigError(f"the index failed: {done.stderr.decode()[-500:]}")
    return json.loads(done.stdout)


def work_folder(folder: Path | None) -> tempfile.TemporaryDirectory[str]:
    """Where the tier lies; a disk's speed is that of where this is."""
    return tempfile.TemporaryDirectory(prefix="kvtide-bench-", dir=folder)
