"""The owner's side of RDMA: devices, regions' keys, and the peers' queue pairs.

The owner's processor takes no part in a transfer; it only sets up. A region's keys
are given to who proves a capability, and die with the region.
"""

import logging
import threading
from collections.abc import Sequence

from kvtide.transfer.buffers import address_of
from kvtide.transfer.errors import Refused, TransferError
from kvtide.transfer.rdma_wire import Reach
from kvtide.transfer.regions import Region
from kvtide.transfer.verbs import Device, Memory, Pair, PairAddress

log = logging.getLogger("kvtide.transfer")


class RdmaOwner:
    """Of one endpoint. Thread-safe."""

    def __init__(self, devices: Sequence[Device]) -> None:
        """Own the devices from now on."""
        self.devices = list(devices)
        self._lock = threading.Lock()
        self._memories: dict[tuple[int, bool], list[Memory]] = {}

    def reach(
        self, region: Region, *, write: bool, expires_in_s: float | None
    ) -> Reach:
        """Keys to a region; registers it at the first time."""
        address = address_of(region.view)
        with self._lock:
            memories = self._memories.get((region.number, write))
            if memories is None:
                remote = "write" if write else "read"
                memories = [
                    device.register(
                        address, region.length, local_write=False, remote=remote
                    )
                    for device in self.devices
                ]
                self._memories[region.number, write] = memories
        keys = tuple(memory.remote_key for memory in memories)
        return Reach(address, region.length, expires_in_s, keys)

    def forget(self, region: int) -> None:
        """The region's keys are worth nothing from now on."""
        with self._lock:
            memories = self._memories.pop((region, False), [])
            memories += self._memories.pop((region, True), [])
        for memory in memories:
            memory.close()

    def pairs(self) -> "OwnerPairs":
        """For a new connection of a peer."""
        return OwnerPairs(self.devices)

    def close(self) -> None:
        """Give all back; after the connections have ended."""
        with self._lock:
            regions = {number for number, _ in self._memories}
        for number in regions:
            self.forget(number)
        for device in self.devices:
            device.close()


class OwnerPairs:
    """The owner's ends of one peer's queue pairs. For the connection's thread."""

    def __init__(self, devices: Sequence[Device]) -> None:
        """None yet."""
        self._devices = devices
        self._pairs: dict[int, Pair] = {}

    def connect(self, index: int, remote: PairAddress) -> PairAddress:
        """Connect, or reset and connect again, the pair on a device; our end of it.

        Raises:
            Refused: there is no such device.
            Unreachable: the device does not take it.
        """
        if index >= len(self._devices):
            raise Refused("there is no such device", path="rdma")
        pair = self._pairs.get(index)
        if pair is None:
            pair = self._pairs[index] = self._devices[index].pair()
        pair.connect(remote)
        return pair.address

    def close(self) -> None:
        """The peer is gone."""
        for pair in self._pairs.values():
            try:
                pair.close()
            except TransferError as error:
                log.warning("closing a queue pair failed: %s", error)
        self._pairs.clear()
