"""Measures transfers between two processes, and this machine's own limits beside them.

Everything is measured in rounds that go through all candidates in turn, so that what
else the machine does hits all alike; a figure is the median of its rounds. A ratio is
taken within the run. Used by ``kvtide bench transfer`` and ``ops/bench/transfer.py``.
"""

import asyncio
import ctypes
import json
import mmap
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from kvtide.runtime import SystemClock
from kvtide.transfer.buffers import address_of
from kvtide.transfer.endpoint import Endpoint
from kvtide.transfer.handles import (
    Access,
    EndpointAddress,
    Operation,
    ReadSlice,
    RegionHandle,
    WriteSlice,
)
from kvtide.transfer.interface import TransferPeer

ARENA_BYTES = 256 << 20
SIZES = (64 << 10, 1 << 20, 16 << 20)
_SECRET = b"only for the two processes of a bench"
_MANY = 8

Step = Callable[[], int]
"""Moves some bytes; how many."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One row: ``limit`` is what it is compared with, ``ratio`` to that limit.

    For ``unit`` "GB/s" more is better, for "us" (a round trip) less is.
    """

    name: str
    transport: str
    operation: str
    nbytes: int
    value: float
    unit: str
    limit: str = ""
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something to measure."""

    name: str
    transport: str
    operation: str
    nbytes: int
    step: Step
    unit: str = "GB/s"
    limit: str = ""


def measure(
    candidates: Sequence[Candidate], *, rounds: int, seconds: float
) -> list[Figure]:
    """Run all candidates in turn, ``rounds`` times, each for ``seconds``."""
    samples: list[list[float]] = [[] for _ in candidates]
    for candidate in candidates:
        candidate.step()
    for _ in range(rounds):
        for found, candidate in zip(samples, candidates, strict=True):
            found.append(_sample(candidate, seconds))
    medians = [statistics.median(found) for found in samples]
    by_name = dict(zip((each.name for each in candidates), medians, strict=True))
    return [
        Figure(
            each.name,
            each.transport,
            each.operation,
            each.nbytes,
            value,
            each.unit,
            each.limit,
            value / by_name[each.limit] if each.limit in by_name else None,
        )
        for each, value in zip(candidates, medians, strict=True)
    ]


def _sample(candidate: Candidate, seconds: float) -> float:
    moved = steps = 0
    started = time.perf_counter()
    while (spent := time.perf_counter() - started) < seconds:
        moved += candidate.step()
        steps += 1
    return spent / steps * 1e6 if candidate.unit == "us" else moved / spent / 1e9


# ---- what the machine can do


def memcpy_limits(size: int) -> list[Candidate]:
    """A copy between two arenas, and a copy that is hashed after, one thread each."""
    source, target = _Arena(), _Arena()
    places = _Places(size)

    def copy() -> int:
        at = places.next()
        ctypes.memmove(target.address + at, source.address + at, size)
        return size

    def copy_and_hash() -> int:
        at = places.next()
        ctypes.memmove(target.address + at, source.address + at, size)
        xxhash.xxh3_64_intdigest(target.view[at : at + size])
        return size

    return [
        Candidate(f"memcpy {size_text(size)}", "limit", "copy", size, copy),
        Candidate(
            f"memcpy + xxh3 {size_text(size)}", "limit", "copy", size, copy_and_hash
        ),
    ]


class _Arena:
    """Memory that is touched and aligned, as that of tensors is."""

    def __init__(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.view = memoryview(mmap.mmap(-1, ARENA_BYTES, flags=flags))
        self.address = address_of(self.view)
        ctypes.memset(self.address, 7, ARENA_BYTES)


class _Places:
    """Offsets that walk through the arena, so that caches do not flatter."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0

    def next(self) -> int:
        at = self._at
        self._at = at + self._size
        if self._at + self._size > ARENA_BYTES:
            self._at = 0
        return at


class BareSocket:
    """A loop over one plain socket to the owner's process: 8 bytes ask for a size."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._into = _Arena().view

    def candidates(self, size: int) -> list[Candidate]:
        """The stream with requests in flight, as a limit; and the round trip."""
        places = _Places(size)
        ask = size.to_bytes(8, "little")

        def fetch() -> None:
            at = places.next()
            got = 0
            while got < size:
                part = self._into[at + got : at + size]
                got += self._sock.recv_into(part, 0, socket.MSG_WAITALL)

        def one() -> int:
            self._sock.sendall(ask)
            fetch()
            return size

        def many() -> int:
            self._sock.sendall(ask * _MANY)
            for _ in range(_MANY):
                fetch()
            return size * _MANY

        name = f"bare socket {size_text(size)}"
        return [
            Candidate(f"{name} x{_MANY}", "limit", "read", size, many),
            Candidate(name, "limit", "read", size, one),
            Candidate(f"{name} round trip", "limit", "read", size, one, "us"),
        ]

    def close(self) -> None:
        """Hang up."""
        self._sock.close()


def _serve_bare(listener: socket.socket, arena: memoryview) -> None:
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with sock:
            places: dict[int, _Places] = {}
            while ask := sock.recv(8, socket.MSG_WAITALL):
                size = int.from_bytes(ask, "little")
                at = places.setdefault(size, _Places(size)).next()
                sock.sendall(arena[at : at + size])


# ---- ours


class Owner(AbstractContextManager["Owner"]):
    """The other process: an endpoint with an arena, and a bare socket."""

    def __init__(self, *, shm: bool) -> None:
        """Start it."""
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "kvtide.transfer.bench", "shm" if shm else "tcp"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._process.stdout is None:
            message = "no pipe to the owner"
            raise RuntimeError(message)
        said = json.loads(self._process.stdout.readline())
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


async def _own(*, shm: bool) -> None:
    async with Endpoint(
        node="owner",
        epoch=1,
        secret=_SECRET,
        clock=SystemClock(),
        shm_dir=_SHM_DIR if shm else None,
    ) as endpoint:
        region = endpoint.allocate(ARENA_BYTES, name="arena")
        region.view[:] = bytes(range(256)) * (ARENA_BYTES // 256)
        listener = socket.create_server(("127.0.0.1", 0))
        bare = threading.Thread(
            target=_serve_bare, args=(listener, region.view), daemon=True
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
        listener.close()


_SHM_DIR = Path("/dev/shm")  # noqa: S108


class Session(AbstractContextManager["Session"]):
    """Our end of a bench."""

    def __init__(self, owner: Owner, *, shm: bool) -> None:
        """Connect to ``owner``."""
        self._loop = asyncio.new_event_loop()
        self._endpoint = Endpoint(
            node="reader",
            epoch=1,
            secret=_SECRET,
            clock=SystemClock(),
            shm_dir=_SHM_DIR if shm else None,
        )
        self._loop.run_until_complete(self._endpoint.start())
        self._peer: TransferPeer = self._endpoint.connect_blocking(owner.address)
        self._handle = owner.handle
        self._arena = _Arena().view

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

    def candidates(self, size: int) -> list[Candidate]:
        """Reads and writes of a size, one by one and several in flight."""
        path = self._peer.path
        found: list[Candidate] = []
        for operation in Operation:
            for count in (1, _MANY):
                limit = f"bare socket {size_text(size)}"
                limit += f" x{_MANY}" if count > 1 else ""
                if path == "shm":
                    limit = f"memcpy + xxh3 {size_text(size)}"
                name = f"{path} {operation} {size_text(size)}"
                name += f" x{count}" if count > 1 else ""
                step = self._step(operation, size, count)
                found.append(Candidate(name, path, operation, size, step, limit=limit))
        limit = f"bare socket {size_text(size)} round trip"
        one = self._step(Operation.READ, size, 1)
        name = f"{path} read {size_text(size)} round trip"
        return [*found, Candidate(name, path, "read", size, one, "us", limit)]

    def _step(self, operation: Operation, size: int, count: int) -> Step:
        places = _Places(size)

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
    *, sizes: Sequence[int] = SIZES, rounds: int = 5, seconds: float = 0.4
) -> list[Figure]:
    """All sizes over shared memory and TCP, with the limits; takes minutes."""
    figures: list[Figure] = []
    for size in sizes:
        for shm in (True, False):
            with Owner(shm=shm) as owner, Session(owner, shm=shm) as session:
                bare = BareSocket(owner.bare_port)
                limits = memcpy_limits(size) if shm else []
                candidates = [
                    *limits,
                    *bare.candidates(size),
                    *session.candidates(size),
                ]
                figures += measure(candidates, rounds=rounds, seconds=seconds)
                bare.close()
    return figures


def table(figures: Sequence[Figure]) -> str:
    """For a terminal or a README: one line for each figure."""
    lines = ["| what | value | of its limit |", "|---|---|---|"]
    for each in figures:
        ratio = "" if each.ratio is None else f"{each.ratio:.2f} of {each.limit}"
        lines.append(f"| {each.name} | {each.value:.2f} {each.unit} | {ratio} |")
    return "\n".join(lines)


def size_text(size: int) -> str:
    """A size as a person writes it: 64 KiB, 1 MiB."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


if __name__ == "__main__":
    asyncio.run(_own(shm=sys.argv[1] == "shm"))
