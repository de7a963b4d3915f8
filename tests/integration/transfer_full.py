"""Reaches for memory that is not there on a full file system, each way; says how it went.

``python transfer_full.py FOLDER``: a process of its own, since the kernel may kill it.
"""

import asyncio
import sys
from collections.abc import Awaitable
from pathlib import Path

from kvtide.runtime import SystemClock
from kvtide.transfer import (
    Access,
    Endpoint,
    OutOfBounds,
    ReadSlice,
    TransferError,
    WriteSlice,
)

KIB = 1 << 10
SIZES = ([KIB], [64 * KIB], [512 * KIB], [80 * KIB, 80 * KIB], [KIB, 2 * KIB])


def make(node: str, shm_dir: Path | None) -> Endpoint:
    secret = b"the secret of this test's cluster"
    clock = SystemClock()
    return Endpoint(node=node, epoch=1, secret=secret, clock=clock, shm_dir=shm_dir)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4 * KIB)):
                pass
        except OSError:
            return


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def outcome(doing: Awaitable[object]) -> str:
    try:
        await doing
    except OutOfBounds as error:
        return f"slice {error.slice_index}"
    except TransferError as error:
        return repr(error)
    return "done"


async def main(folder: Path) -> None:
    async with (
        make("owner", folder) as owner,
        make("near", folder) as near,
        make("far", None) as far,
    ):
        region = owner.allocate(1 << 20, name="arena")
        handle = region.handle(Access.WRITE)
        region.commit(0, 4 * KIB)
        fill(folder / "filler")
        for reader in (near, far):
            peer = await reader.connect(owner.address)
            for sizes in SIZES:
                parts = [memoryview(bytearray(size)) for size in sizes]
                # so far apart that they are no run
                places = [(8 + 300 * at) * KIB for at in range(len(parts))]
                pairs = list(zip(places, parts, strict=True))
                reads = [ReadSlice(handle, at, part) for at, part in pairs]
                writes = [WriteSlice(handle, at, part) for at, part in pairs]
                said = await outcome(peer.read(reads, timeout_s=10))
                say(f"{peer.path} read {sizes} {said}")
                said = await outcome(peer.write(writes, timeout_s=10))
                say(f"{peer.path} write {sizes} {said}")
            # what has memory behind it is as good as ever
            there = ReadSlice(handle, 0, memoryview(bytearray(4 * KIB)))
            said = await outcome(peer.read([there], timeout_s=10))
            say(f"{peer.path} {said}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
