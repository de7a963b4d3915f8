"""The owner's side of RDMA: devices, regions' keys, and the peers' queue pairs.

The owner's processor takes no part in a transfer; it only sets up. A region's keys
are given to who proves a capability, and die with the region. Devices come and go: each
has a number that stays its own, by which peers know it.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtide.transfer.buffers import address_of
from kvtide.transfer.errors import Refused, TransferError, Unreachable
from kvtide.transfer.rdma_wire import MOST_DEVICES, Reach
from kvtide.transfer.regions import Region
from kvtide.transfer.verbs import Device, Memory, Pair, PairAddress

log = logging.getLogger("kvtide.transfer")


@dataclass(frozen=True, slots=True)
class Registered:
    """A region as the devices know it; ``memories[i]`` is that of the i-th."""

    address: int
    length: int
    remote: str
    memories: list[Memory | None]


class RdmaOwner:
    """Of one endpoint. Thread-safe.

    ``devices[i]`` is the i-th, None once it is gone.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        """Own the devices from now on."""
        self.devices: list[Device | None] = list(devices)
        self._names = [device.name for device in devices]
        self._lock = threading.Lock()
        self._registered: dict[tuple[int, bool], Registered] = {}
        self._pairs: set[OwnerPairs] = set()

    def reach(
        self, region: Region, *, write: bool, expires_in_s: float | None
    ) -> Reach:
        """Keys to a region; registers it at the first time.

        Raises:
            Unreachable: a device does not take it, or it is no memory of the host.
        """
        if region.staged:
            raise Unreachable("device memory goes by TCP", path="rdma")
        address = address_of(region.view)
        with self._lock:
            found = self._registered.get((region.number, write))
            if found is None:
                remote = "write" if write else "read"
                found = Registered(address, region.length, remote, [])
                for device in self.devices:
                    found.memories.append(_register(device, found))
                self._registered[region.number, write] = found
            keys = tuple(
                0 if memory is None else memory.remote_key for memory in found.memories
            )
        return Reach(address, region.length, expires_in_s, keys)

    def forget(self, region: int) -> None:
        """The region's keys are worth nothing from now on."""
        with self._lock:
            found = [
                self._registered.pop((region, write), None) for write in (False, True)
            ]
        for each in found:
            for memory in () if each is None else each.memories:
                if memory is not None:
                    memory.close()

    def missing(self, names: Sequence[str]) -> list[str]:
        """Those of ``names`` that we do not have open."""
        with self._lock:
            here = {device.name for device in self.devices if device is not None}
        return [name for name in names if name not in here]

    def gone(self, names: Sequence[str]) -> list[Device]:
        """Our devices that are not among ``names``."""
        with self._lock:
            return [
                device
                for device in self.devices
                if device is not None and device.name not in names
            ]

    def add(self, device: Device) -> None:
        """Own one more; what peers reach already they reach by it too.

        Raises:
            Refused: there are too many.
            Unreachable: it can't register what the others have.
        """
        with self._lock:
            index = len(self.devices)
            if device.name in self._names:
                # it was here before, and is as peers know it
                index = self._names.index(device.name)
            elif index == MOST_DEVICES:
                raise Refused(f"more than {MOST_DEVICES} devices", path="rdma")
            news = [_register(device, each) for each in self._registered.values()]
            if index == len(self.devices):
                self.devices.append(None)
                self._names.append(device.name)
            for each, memory in zip(self._registered.values(), news, strict=True):
                if index == len(each.memories):
                    each.memories.append(None)
                each.memories[index] = memory
            self.devices[index] = device

    def retire(self, device: Device) -> None:
        """Own it no more: its keys and pairs are worth nothing, and it is closed."""
        with self._lock:
            index = self.devices.index(device)
            self.devices[index] = None
            memories = [each.memories[index] for each in self._registered.values()]
            for each in self._registered.values():
                each.memories[index] = None
            pairs = list(self._pairs)
        closing: list[Callable[[], None]] = [
            memory.close for memory in memories if memory is not None
        ]
        for each in pairs:
            each.drop(index)
        for close in (*closing, device.close):
            try:
                close()
            except TransferError as error:
                log.warning("giving up %s: %s", device.name, error)

    def pairs(self) -> "OwnerPairs":
        """For a new connection of a peer."""
        pairs = OwnerPairs(self)
        with self._lock:
            self._pairs.add(pairs)
        return pairs

    def left(self, pairs: "OwnerPairs") -> None:
        """A connection of a peer has ended."""
        with self._lock:
            self._pairs.discard(pairs)

    def close(self) -> None:
        """Give all back; after the connections have ended."""
        with self._lock:
            regions = {number for number, _ in self._registered}
            devices = [device for device in self.devices if device is not None]
        for number in regions:
            self.forget(number)
        for device in devices:
            device.close()


def _register(device: Device | None, what: Registered) -> Memory | None:
    if device is None:
        return None
    return device.register(
        what.address, what.length, local_write=False, remote=what.remote
    )


class OwnerPairs:
    """The owner's ends of one peer's queue pairs. Thread-safe."""

    def __init__(self, owner: RdmaOwner) -> None:
        """None yet."""
        self._owner = owner
        self._lock = threading.Lock()
        self._pairs: dict[int, Pair] = {}

    def connect(self, index: int, remote: PairAddress) -> PairAddress:
        """Connect, or reset and connect again, the pair on a device; our end of it.

        Raises:
            Refused: there is no such device.
            Unreachable: the device is gone, or does not take it.
        """
        devices = self._owner.devices
        if index >= len(devices):
            raise Refused("there is no such device", path="rdma")
        with self._lock:
            device = devices[index]
            if device is None:
                raise Unreachable("the device is gone", path="rdma")
            pair = self._pairs.get(index)
            if pair is None:
                pair = self._pairs[index] = device.pair()
            pair.connect(remote)
            return pair.address

    def drop(self, index: int) -> None:
        """The device is gone, or going."""
        with self._lock:
            pair = self._pairs.pop(index, None)
        if pair is not None:
            _close(pair)

    def close(self) -> None:
        """The peer is gone."""
        self._owner.left(self)
        with self._lock:
            pairs, self._pairs = self._pairs, {}
        for pair in pairs.values():
            _close(pair)


def _close(pair: Pair) -> None:
    try:
        pair.close()
    except TransferError as error:
        log.warning("closing a queue pair failed: %s", error)
