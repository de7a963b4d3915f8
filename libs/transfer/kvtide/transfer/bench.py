"""Measures transfers between two processes, and this machine's own limits beside them.

Everything is measured in rounds that go through all candidates in turn, so that what
else the machine does hits all alike; a figure is the median of its rounds. A ratio is
taken within the run. Used by ``kvtide bench transfer`` and ``ops/bench/transfer.py``.
"""

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtide.runtime import SystemClock
from kvtide.transfer.bench_figures import (
    Candidate,
    Figure,
    Step,
    measure,
    size_text,
)
from kvtide.transfer.bench_limits import (
    ARENA_BYTES,
    MANY,
    Arena,
    BareSocket,
    Places,
    memcpy_limits,
    serve_bare,
)
from kvtide.transfer.endpoint import Endpoint
from kvtide.transfer.errors import Refused, Unreachable
from kvtide.transfer.handles import (
    Access,
    EndpointAddress,
    Operation,
    ReadSlice,
    RegionHandle,
    WriteSlice,
)
from kvtide.transfer.interface import TransferPeer
from kvtide.transfer.regions import Region
from kvtide.transfer.verbs import device_names

SIZES = (64 << 10, 1 << 20, 16 << 20)
TRANSPORTS = ("shm", "tcp", "file", "rdma")
USUAL = ("shm", "tcp")
"""The transports that every machine has."""

_SECRET = b"only for the two processes of a bench"


class Owner(AbstractContextManager["Owner"]):
    """The other process: an endpoint with an arena, and a bare socket."""

    def __init__(self, transport: str) -> None:
        """Start it."""
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "kvtide.transfer.bench", transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._process.stdout is None:
            message = "no pipe to the owner"
            raise RuntimeError(message)
        line = self._process.stdout.readline()
        if not line:
            raise Unreachable("the owner's process ended at once", path=transport)
        said = json.loads(line)
        self.address = EndpointAddress(**said["address"])
        capability = bytes.fromhex(said["handle"].pop("capability"))
        self.handle = RegionHandle(**said["handle"], capability=capability)
        self.bare_port = int(said["bare_port"])

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End it."""
        if self._process.stdin is not None and self._process.stdout is not None:
            self._process.stdin.close()
            self._process.wait(30)
            self._process.stdout.close()


def _endpoint(node: str, transport: str) -> Endpoint:
    return Endpoint(
        node=node,
        epoch=1,
        secret=_SECRET,
        clock=SystemClock(),
        shm_dir=_SHM_DIR if transport in ("shm", "file") else None,
        rdma_devices=None if transport == "rdma" else (),
    )


async def _own(transport: str) -> None:
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as folder:
        async with _endpoint("owner", transport) as endpoint:
            await _serve(endpoint, _region(endpoint, transport, Path(folder)))


def _region(endpoint: Endpoint, transport: str, folder: Path) -> Region:
    if transport == "file":
        path = folder / "arena"
        with path.open("wb") as file:
            file.truncate(ARENA_BYTES)
        region = endpoint.register_file(path, name="arena", writable=True)
    else:
        region = endpoint.allocate(ARENA_BYTES, name="arena")
    region.view[:] = bytes(range(256)) * (ARENA_BYTES // 256)
    return region


async def _serve(endpoint: Endpoint, region: Region) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        bare = threading.Thread(
            target=serve_bare, args=(listener, region.view), daemon=True
        )
        bare.start()
        handle = asdict(region.handle(Access.WRITE))
        handle["capability"] = handle["capability"].hex()
        said = {
            "address": asdict(endpoint.address),
            "handle": handle,
            "bare_port": listener.getsockname()[1],
        }
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


_SHM_DIR = Path("/dev/shm")  # noqa: S108


class Session(AbstractContextManager["Session"]):
    """Our end of a bench."""

    def __init__(self, owner: Owner, transport: str) -> None:
        """Connect to ``owner``."""
        self._path = transport
        self._loop = asyncio.new_event_loop()
        self._endpoint = _endpoint("reader", transport)
        self._loop.run_until_complete(self._endpoint.start())
        self._peer: TransferPeer = self._endpoint.connect_blocking(owner.address)
        self._handle = owner.handle
        self._arena = Arena().view
        if transport == "shm":
            self._touch()

    def _touch(self) -> None:
        """Have the pages of both mappings here, as the limits have theirs."""
        size = ARENA_BYTES // MANY
        for at in range(0, ARENA_BYTES, size):
            for operation in (Operation.READ, Operation.WRITE):
                self._go(operation, at, size).wait_blocking()

    def __enter__(self) -> Self:
        """As it is."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Disconnect."""
        self._endpoint.close_blocking()
        self._loop.close()

    def candidates(self, size: int, operations: Sequence[Operation]) -> list[Candidate]:
        """Transfers of a size, one by one and several in flight."""
        path = self._path
        found: list[Candidate] = []
        for operation in operations:
            for count in (1, MANY):
                limit = f"bare socket {size_text(size)}"
                limit += f" x{MANY}" if count > 1 else ""
                if path != "tcp":
                    limit = f"memcpy + xxh3 {size_text(size)}" if path == "shm" else ""
                name = f"{path} {operation} {size_text(size)}"
                name += f" x{count}" if count > 1 else ""
                step = self._step(operation, size, count)
                found.append(Candidate(name, path, operation, size, step, limit=limit))
        limit = f"bare socket {size_text(size)} round trip"
        one = self._step(Operation.READ, size, 1)
        name = f"{path} read {size_text(size)} round trip"
        return [*found, Candidate(name, path, "read", size, one, "us", limit)]

    def _step(self, operation: Operation, size: int, count: int) -> Step:
        places = Places(size)

        def step() -> int:
            transfers = [self._go(operation, places.next(), size) for _ in range(count)]
            for transfer in transfers:
                transfer.wait_blocking()
            return size * count

        return step

    def _go(self, operation: Operation, at: int, size: int):  # noqa: ANN202
        here = self._arena[at : at + size]
        if operation is Operation.READ:
            return self._peer.read([ReadSlice(self._handle, at, here)], timeout_s=60)
        return self._peer.write([WriteSlice(self._handle, at, here)], timeout_s=60)


def run(
    *,
    sizes: Sequence[int] = SIZES,
    transports: Sequence[str] = USUAL,
    operations: Sequence[Operation] = tuple(Operation),
    rounds: int = 5,
    seconds: float = 0.4,
) -> list[Figure]:
    """All sizes over all transports, with the limits; takes minutes.

    Raises:
        TransferError: a transport is not to be had here ("rdma" without a device).
    """
    if "rdma" in transports and not device_names():
        raise Refused("this machine has no RDMA device", path="rdma")
    figures: list[Figure] = []
    for size in sizes:
        for transport in transports:
            with Owner(transport) as owner, Session(owner, transport) as session:
                bare = BareSocket(owner.bare_port)
                limits = memcpy_limits(size) if transport == "shm" else []
                candidates = [
                    *limits,
                    *bare.candidates(size),
                    *session.candidates(size, operations),
                ]
                figures += measure(candidates, rounds=rounds, seconds=seconds)
                bare.close()
    return figures


if __name__ == "__main__":
    asyncio.run(_own(sys.argv[1]))
