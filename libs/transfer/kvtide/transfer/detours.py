"""Regions of a peer that do not come by the way they should: said once, and remembered."""

import logging
import threading

from kvtide.runtime import Clock
from kvtide.transfer.errors import TransferError
from kvtide.transfer.handles import RegionHandle

log = logging.getLogger("kvtide.transfer")

REMEMBER_S = 60.0
"""Then the short way is tried again: what was in its way may have gone."""

MOST_DETOURS = 4096


class Detours:
    """For one peer and one short way to it, ``path``. Thread-safe."""

    def __init__(self, node: str, path: str, clock: Clock) -> None:
        """There are none."""
        self._node = node
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._until_s: dict[tuple[int, bool], float] = {}
        self._said: set[bool] = set()

    def __len__(self) -> int:
        """Regions, at most."""
        return len(self._until_s)

    def __contains__(self, place: tuple[RegionHandle, bool]) -> bool:
        """Whether (handle, for writing) goes by the network for now."""
        if not self._until_s:
            return False
        handle, writes = place
        until_s = self._until_s.get((handle.region, writes))
        return until_s is not None and self._clock.monotonic() < until_s

    def add(self, region: int, *, writes: bool, reason: TransferError) -> None:
        """A region goes by the network; ``reason`` is logged if it is the first."""
        self.say(reason.message, surprising=True)
        with self._lock:
            if len(self._until_s) >= MOST_DETOURS:
                del self._until_s[next(iter(self._until_s))]
            self._until_s[region, writes] = self._clock.monotonic() + REMEMBER_S

    def say(self, reason: str, *, surprising: bool = False) -> None:
        """Log, once, that memory of the peer goes by the network.

        Once more if it is ``surprising`` for the first time.
        """
        if surprising in self._said:
            return
        self._said.add(surprising)
        log.log(
            logging.WARNING if surprising else logging.INFO,
            "memory of %s goes by the network, not by %s: %s (said once per peer)",
            self._node,
            self._path,
            reason,
        )

    def forget(self, region: int) -> None:
        """The region is gone."""
        with self._lock:
            for writes in (False, True):
                self._until_s.pop((region, writes), None)
