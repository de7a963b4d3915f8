"""A peer's regions as its RDMA devices reach them, as far as we have asked."""

from concurrent.futures import Future
from typing import Protocol

from kvtide.runtime import Clock
from kvtide.transfer.detours import Detours
from kvtide.transfer.errors import AccessDenied, Refused, Unreachable
from kvtide.transfer.handles import Access, RegionHandle
from kvtide.transfer.rdma_wire import Reach, unpack_reach
from kvtide.transfer.wire import Ask, Kind, pack_ask

ASK_S = 2.0
MOST_KNOWN = 4096


class Owner(Protocol):
    """Asks the peer over its control connection."""

    def ask(self, kind: Kind, body: bytes, timeout_s: float) -> bytes:
        """The answer; see ``Control.ask``."""
        ...

    def begin(self, kind: Kind, body: bytes) -> Future[bytes]:
        """The answer, later; see ``Control.begin``."""
        ...


class UnfitError(Unreachable):
    """The region is none for RDMA: another way has to be taken."""


class Reaches:
    """See the module. For one thread; ``detours`` are all the rails'."""

    def __init__(
        self, owner: Owner, clock: Clock, node: str, device: int, detours: Detours
    ) -> None:
        """Know none yet; ``device`` is the owner's, by number."""
        self._owner = owner
        self._clock = clock
        self._node = node
        self._device = device
        self._detours = detours
        self._known: dict[tuple[int, bytes, bool], tuple[Reach, float | None]] = {}

    def of(self, handle: RegionHandle, *, write: bool) -> Reach:
        """Where the region lies; asks the owner at the first use of a right.

        Raises:
            UnfitError: the owner does not give the region to RDMA; it is remembered.
            Unreachable: the owner's device does not reach it.
            AccessDenied: the right has ended, or is none.
        """
        if (handle, write) in self._detours:
            raise UnfitError("not by RDMA", node=self._node, path="rdma")
        key = (handle.region, handle.capability, write)
        known = self._known.get(key)
        if known is not None:
            reach, expires_s = known
            if expires_s is not None and self._clock.monotonic() >= expires_s:
                del self._known[key]
                raise AccessDenied("the capability has expired", node=self._node)
            if self._has_key(reach):
                return reach
        reach = self._ask(handle, write=write)
        expires_s = None
        if reach.expires_in_s is not None:
            expires_s = self._clock.monotonic() + reach.expires_in_s
        if len(self._known) >= MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[key] = (reach, expires_s)
        if not self._has_key(reach):
            raise Unreachable("the peer's device is gone", node=self._node)
        return reach

    def key(self, reach: Reach) -> int:
        """The remote key for our device's work."""
        return reach.keys[self._device]

    def forget(self) -> None:
        """Ask again for all."""
        self._known.clear()

    def _has_key(self, reach: Reach) -> bool:
        return self._device < len(reach.keys) and reach.keys[self._device] != 0

    def _ask(self, handle: RegionHandle, *, write: bool) -> Reach:
        # the piece's offset says whether writing is wanted
        access = Access.WRITE if write else Access.READ
        place = (0, int(access is Access.WRITE), 0)
        ask = Ask([(handle.region, handle.capability)], [place], "rdma")
        try:
            answer = self._owner.ask(Kind.RDMA_REACH, pack_ask(ask), ASK_S)
        except Refused as error:
            self._detours.add(handle.region, writes=write, reason=error)
            raise UnfitError(error.message, node=self._node, path="rdma") from error
        return unpack_reach(answer)
