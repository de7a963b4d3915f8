"""The owner's side of RDMA: devices, regions' keys, and the peers' queue pairs.

The owner's processor takes no part in a transfer; it only sets up, and looks at what was
written. A region's keys are given to who proves a capability, and die with the region.
A right that ends has keys of its own, which die soon after it. Devices come and go: each
has a number that stays its own, by which peers know it.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtide.transfer.buffers import address_of
from kvtide.transfer.errors import Refused, TransferError
from kvtide.transfer.fence import Shut
from kvtide.transfer.rdma_pairs import OwnerPairs
from kvtide.transfer.rdma_wire import MOST_DEVICES, Reach
from kvtide.transfer.regions import Grant
from kvtide.transfer.verbs import Device, Memory

log = logging.getLogger("kvtide.transfer")

GRACE_S = 1.0
"""So much longer than the right its keys live: what began in time may end."""

MOST_ENDING = 1024
"""Rights that end and have keys, at a time: each costs a device a table of pages."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A region as the devices know it; ``memories[i]`` is that of the i-th."""

    address: int
    length: int
    remote: str
    expires_s: float | None
    memories: list[Memory | None]

    def close(self) -> None:
        """Its keys are worth nothing from now on."""
        for memory in self.memories:
            if memory is not None:
                _quietly(memory.close)


class RdmaOwner:
    """Of one endpoint. Thread-safe.

    ``devices[i]`` is the i-th, None once it is gone.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        """Own the devices from now on."""
        self.devices: list[Device | None] = list(devices)
        self._names = [device.name for device in devices]
        self._lock = threading.Lock()
        # by region, whether for writing, and the right if that ends
        self._registered: dict[tuple[int, bool, bytes], Registered] = {}
        self._ending = 0
        self._pairs: set[OwnerPairs] = set()

    def reach(
        self, grant: Grant, capability: bytes, *, write: bool, now_s: float
    ) -> Reach:
        """Keys to a region; registers it at the first time.

        Raises:
            Refused: the region is no memory of the host, a device does not take it,
                or too many rights that end have keys.
        """
        region = grant.region
        if region.staged:
            raise Refused("a GPU's memory goes by TCP", path="rdma")
        ends = grant.expires_s is not None
        key = (region.number, write, capability if ends else b"")
        with self._lock:
            found = self._registered.get(key)
            if found is None:
                if ends and self._ending >= MOST_ENDING:
                    raise Refused("too many rights that end", path="rdma")
                found = Registered(
                    address_of(region.view),
                    region.length,
                    "write" if write else "read",
                    grant.expires_s,
                    [],
                )
                self._register_all(found)
                self._registered[key] = found
                self._ending += ends
            keys = tuple(
                0 if memory is None else memory.remote_key for memory in found.memories
            )
        return Reach(found.address, region.length, grant.left_s(now_s), keys)

    def _register_all(self, what: Registered) -> None:
        try:
            for device in self.devices:
                what.memories.append(_register(device, what))
        except TransferError as error:
            what.close()
            raise Refused(error.message, path="rdma") from error

    def forget(self, region: int) -> None:
        """The region's keys are worth nothing from now on."""
        self._take_back(lambda key, _: key[0] == region)

    def expire(self, now_s: float) -> None:
        """Nor are those of rights that have ended; to be called every second."""
        self._take_back(
            lambda _, each: (
                each.expires_s is not None and each.expires_s + GRACE_S <= now_s
            )
        )

    def _take_back(
        self, over: Callable[[tuple[int, bool, bytes], Registered], bool]
    ) -> None:
        with self._lock:
            keys = [key for key, each in self._registered.items() if over(key, each)]
            found = [self._registered.pop(key) for key in keys]
            self._ending -= sum(each.expires_s is not None for each in found)
        for each in found:
            each.close()

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
            _quietly(close)

    def pairs(self, shut: Shut) -> OwnerPairs:
        """For a new connection of a peer; ``shut`` knows what peers gave up."""
        pairs = OwnerPairs(self.devices, shut, self._left)
        with self._lock:
            self._pairs.add(pairs)
        return pairs

    def _left(self, pairs: OwnerPairs) -> None:
        with self._lock:
            self._pairs.discard(pairs)

    def close(self) -> None:
        """Give all back; after the connections have ended."""
        self._take_back(lambda _, __: True)
        with self._lock:
            devices = [device for device in self.devices if device is not None]
        for device in devices:
            device.close()


def _register(device: Device | None, what: Registered) -> Memory | None:
    if device is None:
        return None
    return device.register(
        what.address, what.length, local_write=False, remote=what.remote
    )


def _quietly(close: Callable[[], None]) -> None:
    try:
        close()
    except TransferError as error:
        log.warning("%s", error)
