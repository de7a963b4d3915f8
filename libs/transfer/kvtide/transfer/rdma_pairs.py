"""The owner's ends of one peer's queue pairs."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvtide.transfer.errors import Refused, TransferError, Unreachable
from kvtide.transfer.fence import Shut
from kvtide.transfer.verbs import Device, Pair, PairAddress

log = logging.getLogger("kvtide.transfer")


@dataclass(frozen=True, slots=True)
class Connected:
    """A pair, and the name of its connection; see ``fence``."""

    pair: Pair
    lane: bytes


class OwnerPairs:
    """One for each device at most. Thread-safe."""

    def __init__(
        self,
        devices: Sequence[Device | None],
        shut: Shut,
        left: Callable[["OwnerPairs"], None],
    ) -> None:
        """None yet. ``devices`` are the owner's list, as it is at any time."""
        self._devices = devices
        self._shut = shut
        self._left = left
        self._lock = threading.Lock()
        self._pairs: dict[int, Connected] = {}

    def connect(self, index: int, remote: PairAddress, lane: bytes) -> PairAddress:
        """Connect, or reset and connect again, the pair on a device; our end of it.

        Raises:
            Refused: there is no such device.
            Unreachable: the device is gone, or does not take it.
        """
        if index >= len(self._devices):
            raise Refused("there is no such device", path="rdma")
        with self._lock:
            device = self._devices[index]
            if device is None:
                raise Unreachable("the device is gone", path="rdma")
            pair = self._reset(index) or device.pair()
            # before it connects: it may be given up at any time after
            if not self._shut.enter(lane, partial(self._end, index, lane)):
                _close(pair)
                raise Unreachable("the peer gave it up", path="rdma")
            self._pairs[index] = Connected(pair, lane)
            try:
                pair.connect(remote)
            except TransferError:
                self._drop(index)
                raise
            return pair.address

    def _reset(self, index: int) -> Pair | None:
        """Take the pair from its last connection, if there was one that can be reset."""
        last = self._pairs.pop(index, None)
        if last is None:
            return None
        try:
            last.pair.reset()
        except TransferError as error:
            log.info("a queue pair is made anew: %s", error)
            _close(last.pair)
            return None
        finally:
            self._shut.leave(last.lane)
        return last.pair

    def _end(self, index: int, lane: bytes) -> None:
        """The peer gave a connection up."""
        with self._lock:
            found = self._pairs.get(index)
            if found is not None and found.lane == lane:
                self._drop(index)

    def _drop(self, index: int) -> None:
        found = self._pairs.pop(index, None)
        if found is not None:
            _close(found.pair)
            self._shut.leave(found.lane)

    def drop(self, index: int) -> None:
        """The device is gone, or going."""
        with self._lock:
            self._drop(index)

    def close(self) -> None:
        """The peer is gone."""
        self._left(self)
        with self._lock:
            for index in list(self._pairs):
                self._drop(index)


def _close(pair: Pair) -> None:
    try:
        pair.close()
    except TransferError as error:
        log.warning("closing a queue pair failed: %s", error)
