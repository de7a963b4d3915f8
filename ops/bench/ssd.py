"""How fast verified reads from the SSD tier are, beside bare direct reads of the files.

``python ops/bench/ssd.py [FOLDER]`` writes blocks of 1.5 MiB into a tier in ``FOLDER``
and reads them back in both ways, by turns, with equal threads and buffers. All reads go
past the page cache.
"""

import mmap
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from xxhash import xxh3_64_intdigest

from kvtide.kv import BlockKey, Layout, SpaceTags, make_header
from kvtide.runtime import SystemClock
from kvtide.store.checks import Verify
from kvtide.store.ssd.buffers import Buffers
from kvtide.store.ssd.events import ReadRecord, RecordDone, WriteRecord
from kvtide.store.ssd.files import FilesSpec, TierFiles
from kvtide.store.ssd.format import PAGE_BYTES, record_bytes
from kvtide.store.ssd.segments import Place

LAYOUT = Layout(layers=24, kv_heads=4, head_dim=64, kv_dtype="float16", block_tokens=64)
TAGS = SpaceTags(0, b"m" * 16, b"l" * 16, b"t" * 16)
BLOCKS = 256
SEGMENT_BLOCKS = 32
TURNS = 5


@dataclass(frozen=True, slots=True)
class SsdSpeed:
    """Medians over turns, in bytes a second; ``ratio`` is the median of the ratios."""

    threads: int
    block_bytes: int
    direct: bool
    bare_bytes_per_s: float
    verified_bytes_per_s: float
    ratio: float


def measure(folder: Path, *, threads: int = 4, blocks: int = BLOCKS) -> SsdSpeed:
    """Write ``blocks`` blocks into a tier in ``folder``, and read them in both ways."""
    slot = LAYOUT.slot_bytes
    arena = memoryview(mmap.mmap(-1, slot * threads))
    files = TierFiles(FilesSpec(folder, "bench", 1), arena, SystemClock())
    opened = files.open(lambda _found: None)
    try:
        reads = _write(files, arena, blocks)
        order = random.Random(1)
        clock, bare, verified = SystemClock(), list[float](), list[float]()
        own = Buffers()
        paths = sorted(folder.glob("*.seg"))
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(TURNS):
                order.shuffle(reads)
                ways: Sequence[tuple[list[float], Callable[[int], None]]] = (
                    (bare, lambda i: _bare(paths, own, reads[i])),
                    (verified, lambda i: _verified(files, reads[i], i % threads)),
                )
                for times, way in ways:
                    began_s = clock.monotonic()
                    list(pool.map(way, range(len(reads))))
                    times.append(clock.monotonic() - began_s)
    finally:
        files.close()
    length = slot * blocks
    ratios = [one / other for one, other in zip(bare, verified, strict=True)]
    return SsdSpeed(
        threads=threads,
        block_bytes=slot,
        direct=getattr(opened, "direct", False),
        bare_bytes_per_s=length / statistics.median(bare),
        verified_bytes_per_s=length / statistics.median(verified),
        ratio=statistics.median(ratios),
    )


def _write(files: TierFiles, arena: memoryview, blocks: int) -> list[ReadRecord]:
    length = record_bytes(LAYOUT.slot_bytes)
    reads: list[ReadRecord] = []
    for number in range(blocks):
        wanted = _fill(arena, number)
        segment, position = divmod(number, SEGMENT_BLOCKS)
        place = Place(segment + 1, PAGE_BYTES + position * length, length)
        done = files.do(WriteRecord(number, place, number + 1, wanted))
        if not isinstance(done, RecordDone) or done.trouble is not None:
            message = f"the blocks could not be written: {done}"
            raise OSError(message)
        reads.append(ReadRecord(number, place, number + 1, wanted, number + 10_000))
    return reads


def _fill(arena: memoryview, number: int) -> Verify:
    """A block with bytes of its own in the first slot."""
    size = LAYOUT.part_bytes
    parts = [
        random.Random(number * 1000 + part % 3).randbytes(size)
        for part in range(LAYOUT.parts)
    ]
    key = BlockKey(number.to_bytes(16, "big"))
    raw = make_header(
        key=key,
        tags=TAGS,
        generation=number + 1,
        tokens=LAYOUT.block_tokens,
        part_xxh3=[xxh3_64_intdigest(part) for part in parts],
        layout=LAYOUT,
    ).encode(LAYOUT)
    arena[: LAYOUT.slot_bytes] = raw + b"".join(parts)
    return Verify(
        slot=0,
        generation=number + 1,
        offset=0,
        slot_bytes=LAYOUT.slot_bytes,
        header_bytes=LAYOUT.header_bytes,
        key=key,
        tags=TAGS,
        tokens=LAYOUT.block_tokens,
        header_xxh3=xxh3_64_intdigest(raw),
    )


def _bare(paths: Sequence[Path], own: Buffers, read: ReadRecord) -> None:
    buffer = own.get(read.place.length)
    path = paths[read.place.segment - 1]
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        os.preadv(fd, [buffer], read.place.offset)
    finally:
        os.close(fd)


def _verified(files: TierFiles, read: ReadRecord, slot: int) -> None:
    wanted = replace(read.wanted, slot=slot, offset=slot * LAYOUT.slot_bytes)
    done = files.do(replace(read, wanted=wanted))
    if not isinstance(done, RecordDone) or done.trouble is not None:
        message = f"a block could not be read: {done}"
        raise OSError(message)


def main() -> None:
    """Measure with several threads and print a line for each."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    for threads in (1, 2, 4):
        path = folder / f"ssd-{threads}"
        try:
            speed = measure(path, threads=threads)
        finally:
            shutil.rmtree(path, ignore_errors=True)
        sys.stdout.write(
            f"{speed.threads} threads, {speed.block_bytes / 2**20:.2f} MiB blocks, "
            f"{'direct' if speed.direct else 'buffered'}: verified "
            f"{speed.verified_bytes_per_s / 2**20:.0f} MiB/s, bare "
            f"{speed.bare_bytes_per_s / 2**20:.0f} MiB/s, ratio {speed.ratio:.2f}\n"
        )


if __name__ == "__main__":
    main()
