"""Our RDMA transport beside ib_write_bw, on this machine's first device.

    ops/rdma/vm.sh --timeout 900 'python3 ops/rdma/bench.py' >ops/bench/results/rdma.md

In the emulated guest this measures the processor, not a network: only the ratio of the
two, measured in turn, says something. ib_write_bw moves bytes and nothing else; ours
copies through a staging area and hashes, and has the owner compare what was written.
"""

# ruff: noqa: T201 - for a terminal

import asyncio
import logging
import statistics
import subprocess
import sys
import time

from kvtide.runtime import SystemClock
from kvtide.transfer import Access, Endpoint, ReadSlice, WriteSlice
from kvtide.transfer.bench_figures import size_text
from kvtide.transfer.bench_report import this_machine
from kvtide.transfer.verbs import device_names

SECRET = b"only for the two ends of a bench"
ROUNDS = 3
SECONDS = 6.0
ITERATIONS = 100


def perftest(device: str, size: int) -> float:
    """MB/s of ib_write_bw between two processes."""
    command = [
        *("ib_write_bw", "-d", device, "-s", str(size), "-n", str(ITERATIONS)),
        *("-m", "4096", "-x", "1", "-F", "--report_gbits", "-p", "18515"),
    ]
    server = subprocess.Popen(  # noqa: S603
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        # it does not say when it listens
        time.sleep(2)
        done = subprocess.run(  # noqa: S603
            [*command, "127.0.0.1"],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        server.wait(60)
    finally:
        server.kill()
        server.wait()
    rows = [line.split() for line in done.stdout.splitlines()]
    (row,) = (row for row in rows if row and row[0] == str(size))
    return float(row[3]) * 1000 / 8


async def ours(device: str, size: int) -> tuple[float, float]:
    """MB/s of our reads and writes between two endpoints, one device."""
    async with (
        Endpoint(
            node="owner",
            epoch=1,
            secret=SECRET,
            clock=SystemClock(),
            shm_dir=None,
            rdma_devices=[device],
        ) as owner,
        Endpoint(
            node="reader",
            epoch=1,
            secret=SECRET,
            clock=SystemClock(),
            shm_dir=None,
            rdma_devices=[device],
        ) as reader,
    ):
        region = owner.register(bytearray(8 * size), name="arena")
        handle = region.handle(Access.WRITE)
        peer = await reader.connect(owner.address, timeout_s=30)
        views = [memoryview(bytearray(size)) for _ in range(8)]
        rates: list[float] = []
        for write in (False, True):
            moved = 0
            started = time.perf_counter()
            while (spent := time.perf_counter() - started) < SECONDS:
                transfers = [
                    peer.write([WriteSlice(handle, at * size, view)], timeout_s=120)
                    if write
                    else peer.read([ReadSlice(handle, at * size, view)], timeout_s=120)
                    for at, view in enumerate(views)
                ]
                for transfer in transfers:
                    result = await transfer
                    if result.path != "rdma":
                        sys.exit(f"went by {result.path}")
                moved += 8 * size
            rates.append(moved / spent / 1e6)
        return rates[0], rates[1]


def main() -> None:
    """Measure in turn, round by round; a table."""
    logging.disable(logging.INFO)
    device = device_names()[0]
    print("| bytes | round | ib_write_bw MB/s | our writes | our reads |")
    print("|---|---|---|---|---|", flush=True)
    lines: list[str] = []
    for size in (65536, 1 << 20):
        rounds: list[tuple[float, float, float]] = []
        for number in range(ROUNDS):
            bare = perftest(device, size)
            read, write = asyncio.run(ours(device, size))
            rounds.append((bare, write, read))
            row = f"| {size} | {number + 1} | {bare:.1f} | {write:.1f} | {read:.1f} |"
            print(row, flush=True)
        bare, write, read = map(statistics.median, zip(*rounds, strict=True))
        lines.append(
            f"- {size_text(size)}: our writes are {write / bare:.2f} of ib_write_bw's "
            f"{bare:.1f} MB/s, our reads {read / bare:.2f} (medians)"
        )
    print("", *lines, "", sep="\n")
    print(f"{device} (Soft-RoCE in an emulated guest: it measures the processor);")
    print(this_machine())


if __name__ == "__main__":
    main()
