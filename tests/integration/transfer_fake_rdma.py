"""RDMA devices that copy memory of this process: what verbs do, without verbs."""

import ctypes
import itertools
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from kvtide.transfer.errors import Unreachable
from kvtide.transfer.own_ways import System
from kvtide.transfer.verbs import Completion, Device, PairAddress, Work


@dataclass
class FakeMemory:
    """Registered memory; its keys die with it."""

    fabric: "Fabric"
    address: int
    length: int
    remote: str
    local_key: int
    remote_key: int

    def close(self) -> None:
        self.fabric.memories.pop(self.remote_key, None)


@dataclass
class Fabric:
    """The machine's devices: ``there`` are those that can be found now."""

    there: list[str]
    down: set[str] = field(default_factory=set[str])
    memories: dict[int, FakeMemory] = field(default_factory=dict[int, FakeMemory])
    moved: dict[str, int] = field(default_factory=dict[str, int])
    open: list[str] = field(default_factory=list[str])
    refuses: bool = False
    """Takes no memory of peers' regions, as where too little may be locked."""
    spoil: int = 0
    """So many writes arrive with a byte changed."""
    late: list[tuple[PairAddress, PairAddress | None, Work, bytes]] | None = None
    """Writes that are lost on the way, to come later: see ``deliver``."""

    def __post_init__(self) -> None:
        self.keys = itertools.count(1000)
        self.pairs: dict[PairAddress | None, FakePair] = {}
        self.lock = threading.Lock()

    def deliver(self) -> int:
        """What was late comes now; how many writes of it a pair still takes."""
        came = 0
        late, self.late = self.late or [], None
        for sender, receiver, work, data in late:
            other = self.pairs.get(receiver)
            if other is not None and other.remote == sender:
                ctypes.memmove(work.remote_address, data, work.length)
                came += 1
        return came

    def system(self) -> System:
        return System(
            device_names=lambda: list(self.there),
            open_device=lambda name: cast("Device", FakeDevice(self, name)),
            hosts=lambda: ("127.0.0.1",),
        )


class FakeDevice:
    def __init__(self, fabric: Fabric, name: str) -> None:
        if name not in fabric.there:
            raise Unreachable(f"cannot open {name}", path="rdma")
        self.fabric = fabric
        self.name = name
        self.gid = f"::ffff:{name}"
        fabric.open.append(name)

    def active(self) -> bool:
        return self.name not in self.fabric.down

    def register(
        self, address: int, length: int, *, local_write: bool, remote: str
    ) -> FakeMemory:
        del local_write
        if remote and self.fabric.refuses:
            raise Unreachable(f"{self.name} cannot register {length} bytes")
        with self.fabric.lock:
            key = next(self.fabric.keys)
            memory = FakeMemory(self.fabric, address, length, remote, key, key)
            self.fabric.memories[key] = memory
        return memory

    def pair(self) -> "FakePair":
        return FakePair(self)

    def close(self) -> None:
        self.fabric.open.remove(self.name)


class FakePair:
    """Fails as a device does: the first bad request, then all after it."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._done: list[Completion] = []
        self._broken = False
        self.remote: PairAddress | None = None
        self._renew()

    def _renew(self) -> None:
        fabric = self._device.fabric
        self.address = PairAddress(next(fabric.keys), 1, self._device.gid)
        fabric.pairs[self.address] = self

    def fileno(self) -> int:
        return self._fd

    def connect(self, remote: PairAddress) -> None:
        assert remote.gid == self._device.gid, "one rail for each device"
        assert self.remote is None, "reset it first"
        self.remote = remote
        self._broken = False

    def reset(self) -> None:
        self.remote = None
        del self._device.fabric.pairs[self.address]
        self._done.clear()
        self._renew()

    def post(self, works: Sequence[Work]) -> None:
        for work in works:
            status = "WR_FLUSH_ERR" if self._broken else self._do(work)
            if status != "SUCCESS" or work.signaled:
                self._done.append(Completion(work.work_id, status))
            self._broken = self._broken or status != "SUCCESS"
        os.eventfd_write(self._fd, 1)

    def _do(self, work: Work) -> str:
        fabric = self._device.fabric
        if self._device.name in fabric.down:
            return "RETRY_EXC_ERR"
        memory = fabric.memories.get(work.remote_key)
        if memory is None or (work.write and memory.remote != "write"):
            return "REM_ACCESS_ERR"
        start = work.remote_address - memory.address
        if start < 0 or start + work.length > memory.length:
            return "REM_ACCESS_ERR"
        ends = [work.local_address, work.remote_address]
        if work.write:
            ends.reverse()
            if fabric.late is not None:
                data = ctypes.string_at(work.local_address, work.length)
                fabric.late.append((self.address, self.remote, work, data))
                return "RETRY_EXC_ERR"
        ctypes.memmove(ends[0], ends[1], work.length)
        with fabric.lock:
            if work.write and fabric.spoil:
                fabric.spoil -= 1
                ctypes.memset(work.remote_address, 0, 1)
            moved = fabric.moved.get(self._device.name, 0)
            fabric.moved[self._device.name] = moved + work.length
        return "SUCCESS"

    def completions(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def acknowledge(self) -> None:
        os.eventfd_read(self._fd)

    def close(self) -> None:
        del self._device.fabric.pairs[self.address]
        os.close(self._fd)
