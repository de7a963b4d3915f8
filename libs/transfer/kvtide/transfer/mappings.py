"""A peer's shared memory as mapped by us, with the rights to it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtide.runtime import Clock
from kvtide.transfer.errors import AccessDenied, Refused, Unreachable
from kvtide.transfer.handles import Access, RegionHandle
from kvtide.transfer.shm import Attached, attach
from kvtide.transfer.wire import Ask, pack_ask, unpack_mapped

AskToMap = Callable[[bytes], bytes]
"""Sends the body of a MAP request; gives the answer's."""

MOST_RIGHTS = 4096


@dataclass(frozen=True, slots=True)
class Right:
    """That a capability was accepted by the owner, until when (None: for ever)."""

    memory: Attached
    expires_s: float | None


class NotMappedError(Refused):
    """The region is shared memory, but this process can't map it."""


class Mappings:
    """Maps each region once for reading and once for writing. Thread-safe."""

    def __init__(self, shm_dir: Path, node: str, clock: Clock, ask: AskToMap) -> None:
        """Ask the peer through ``ask``."""
        self._shm_dir = shm_dir
        self._node = node
        self._clock = clock
        self._ask = ask
        self._lock = threading.Lock()
        self._attached: dict[tuple[int, bool], Attached] = {}
        self._rights: dict[tuple[int, bytes, bool], Right] = {}
        # of regions that went while the owner was asked; nothing needs the others
        self._under_way = 0
        self._gone: set[int] = set()
        self._closed = False

    def reach(self, handle: RegionHandle, *, writable: bool) -> Attached:
        """The region's memory; blocks for a round trip at the first use of a right.

        Raises:
            Refused: it has no shared memory; ``NotMappedError``: none for us.
            AccessDenied: by the owner, or the right has ended.
            Unreachable: the peer is gone.
        """
        key = (handle.region, handle.capability, writable)
        with self._lock:
            right = self._usable(key)
        if right is None:
            right = self._obtain(handle, writable=writable)
        return right.memory

    def known(self, handle: RegionHandle, *, writable: bool) -> bool:
        """Whether ``reach`` would not block."""
        with self._lock:
            key = (handle.region, handle.capability, writable)
            return self._closed or key in self._rights

    def at_hand(self, handle: RegionHandle, *, writable: bool) -> Attached | None:
        """The region's memory if nothing need be asked or said about it."""
        right = self._rights.get((handle.region, handle.capability, writable))
        if right is None:
            return None
        if right.expires_s is not None and right.expires_s <= self._clock.monotonic():
            return None
        return right.memory

    def _usable(self, key: tuple[int, bytes, bool]) -> Right | None:
        if self._closed:
            raise Unreachable("the peer is gone", node=self._node, path="shm")
        right = self._rights.get(key)
        if right is None or right.expires_s is None:
            return right
        if self._clock.monotonic() < right.expires_s:
            return right
        del self._rights[key]
        raise AccessDenied("the capability has expired", node=self._node, path="shm")

    def _obtain(self, handle: RegionHandle, *, writable: bool) -> Right:
        if not handle.shm_name:
            raise Refused(
                "the region has no shared memory", node=self._node, path="shm"
            )
        access = Access.WRITE if writable else Access.READ
        grant = (handle.region, handle.capability)
        # the piece's offset says whether writing is wanted
        ask = Ask([grant], [(0, int(access is Access.WRITE), 0)], "map")
        with self._lock:
            self._under_way += 1
        try:
            length, left_s, name = unpack_mapped(self._ask(pack_ask(ask)))
            expires_s = None if left_s is None else self._clock.monotonic() + left_s
            return self._attach(handle, name, length, expires_s, writable=writable)
        finally:
            with self._lock:
                self._under_way -= 1
                if not self._under_way:
                    self._gone.clear()

    def _attach(
        self,
        handle: RegionHandle,
        name: str,
        length: int,
        expires_s: float | None,
        *,
        writable: bool,
    ) -> Right:
        with self._lock:
            if self._closed:
                raise Unreachable("the peer is gone", node=self._node, path="shm")
            if handle.region in self._gone:
                raise AccessDenied("the region is gone", node=self._node, path="shm")
            memory = self._attached.get((handle.region, writable))
            if memory is None:
                memory = self._map(name, length, writable=writable)
                self._attached[handle.region, writable] = memory
            right = Right(memory, expires_s)
            if len(self._rights) >= MOST_RIGHTS:
                del self._rights[next(iter(self._rights))]
            self._rights[handle.region, handle.capability, writable] = right
        return right

    def _map(self, name: str, length: int, *, writable: bool) -> Attached:
        try:
            return attach(self._shm_dir, name, length, writable=writable)
        except (Refused, Unreachable, OSError) as error:
            raise NotMappedError(str(error), node=self._node, path="shm") from error

    def forget(self, region: int) -> None:
        """The owner took the region back."""
        with self._lock:
            if self._under_way:
                self._gone.add(region)
            for writable in (False, True):
                self._attached.pop((region, writable), None)
            for key in [key for key in self._rights if key[0] == region]:
                del self._rights[key]

    def close(self) -> None:
        """Let go of all; memory is unmapped when its last view goes."""
        with self._lock:
            self._closed = True
            self._attached.clear()
            self._rights.clear()
