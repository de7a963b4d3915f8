"""The memory that an endpoint lets others reach."""

import mmap
import threading
from typing import NamedTuple, Protocol

from kvtide.runtime import Clock
from kvtide.transfer.buffers import address_of
from kvtide.transfer.capability import CapabilityMint
from kvtide.transfer.cuda import Stage
from kvtide.transfer.errors import (
    AccessDenied,
    OutOfBounds,
    TimedOut,
    TransferError,
)
from kvtide.transfer.handles import Access, RegionHandle
from kvtide.transfer.shm import backed

_MOST_CHECKED = 4096


class Backing(Protocol):
    """What holds a region's memory."""

    def commit(self, offset: int, length: int) -> None:
        """Have real memory there; raises OSError when there is none."""
        ...

    def release(self, offset: int, length: int) -> None:
        """Give whole pages back."""
        ...

    def dispose(self) -> None:
        """Let go of all."""
        ...


class Region:
    """Memory that peers may reach with a handle. Made by an endpoint.

    ``view`` is the memory itself, for the owner.
    """

    def __init__(
        self,
        table: "RegionTable",
        number: int,
        view: memoryview,
        *,
        name: str,
        location: str,
        shm_name: str,
        backing: Backing | None,
        stage: Stage | None = None,
    ) -> None:
        """Made by ``RegionTable.add``."""
        self.stage = stage
        self.number = number
        self.name = name
        self.location = location
        self.shm_name = shm_name
        self.view = view
        self._address = address_of(view) if shm_name and len(view) else 0
        self._table = table
        self._backing = backing

    @property
    def staged(self) -> bool:
        """Whether its memory is a GPU's: then ``view`` is empty."""
        return self.stage is not None

    @property
    def length(self) -> int:
        """Bytes."""
        return len(self.view) if self.stage is None else self.stage.memory.length

    def handle(
        self, access: Access = Access.READ, ttl_s: float | None = None
    ) -> RegionHandle:
        """The right to reach this region for ``ttl_s`` seconds (None: for its life).

        Raises:
            AccessDenied: WRITE access to a read-only buffer.
        """
        return self._table.handle(self, access, ttl_s)

    def commit(self, offset: int, length: int) -> None:
        """Have real memory behind a range of allocated memory before it is written.

        Shared memory is promised more than once: writing where none is left kills the
        process. Blocks while the kernel clears pages; for nothing if they are there.

        Raises:
            OutOfBounds: the range is not inside the region.
            TransferError: the shared memory is full; what to do about it.
        """
        check_range(offset, length, self.length, 0)
        if self._backing is None or not length:
            return
        try:
            self._backing.commit(offset, length)
        except OSError as error:
            raise TransferError(
                f"no memory for {length} bytes of region {self.name!r}: {error}; make "
                "the shared-memory file system larger or the region smaller"
            ) from error

    def backed(self, offset: int, length: int, *, write: bool) -> bool:
        """Whether a range inside can be used without this process being killed.

        See ``shm.backed``.
        """
        at = self._address
        return not at or backed(at + offset, length, write=write)

    def release(self, offset: int, length: int) -> None:
        """Give the memory behind a range back to the system; it reads as zeros.

        Only whole pages inside the range are given back. Nobody may be using it: who
        begins to read it later gets zeros, or an error where the shared memory is full;
        who is in the middle of copying it when that gets full is killed.

        Raises:
            OutOfBounds: the range is not inside the region.
        """
        check_range(offset, length, self.length, 0)
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (offset + length) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._backing is not None and first < last:
            self._backing.release(first, last - first)

    def dispose(self) -> None:
        """Give back what the endpoint made for it; called by the endpoint, once."""
        backing, self._backing = self._backing, None
        if backing is not None:
            backing.dispose()


class Grant(NamedTuple):
    """A checked right to use a region now; must be released."""

    region: Region
    expires_s: float | None

    def left_s(self, now_s: float) -> float | None:
        """Seconds until it ends; None: never."""
        return None if self.expires_s is None else self.expires_s - now_s


class RegionTable:
    """The regions of one endpoint, with who uses them. Thread-safe."""

    def __init__(self, mint: CapabilityMint, clock: Clock) -> None:
        """Start empty."""
        self._mint = mint
        self._clock = clock
        self._lock = threading.Lock()
        self._unused = threading.Condition(self._lock)
        self._awaited = 0
        self._regions: dict[int, Region] = {}
        self._users: dict[int, int] = {}
        self._last = 0
        self._places: list[tuple[int, int, str]] | None = None
        # capabilities whose MAC was right, with their expiry
        self._checked: dict[tuple[int, bytes, Access], float | None] = {}

    def add(
        self,
        view: memoryview,
        *,
        name: str,
        location: str,
        shm_name: str = "",
        backing: Backing | None = None,
        stage: Stage | None = None,
    ) -> Region:
        """Put memory in; its number is new in this epoch."""
        with self._lock:
            self._last += 1
            region = Region(
                self,
                self._last,
                view,
                name=name,
                location=location,
                shm_name=shm_name,
                backing=stage if backing is None else backing,
                stage=stage,
            )
            self._regions[region.number] = region
            self._places = None
        return region

    def location_of(self, address: int) -> str | None:
        """The location of the region that holds the address, if one does."""
        with self._lock:
            if self._places is None:
                self._places = [
                    (start, start + each.length, each.location)
                    for each in self._regions.values()
                    if len(each.view)
                    for start in (address_of(each.view),)
                ]
            for start, end, location in self._places:
                if start <= address < end:
                    return location
        return None

    def regions(self) -> list[Region]:
        """Those that are reachable now."""
        with self._lock:
            return list(self._regions.values())

    def handle(
        self, region: Region, access: Access, ttl_s: float | None
    ) -> RegionHandle:
        """See ``Region.handle``."""
        if access is Access.WRITE and region.view.readonly and not region.staged:
            raise AccessDenied(f"region {region.name!r} is read-only")
        expires_s = None if ttl_s is None else self._clock.monotonic() + ttl_s
        return RegionHandle(
            node=self._mint.node,
            epoch=self._mint.epoch,
            region=region.number,
            length=region.length,
            capability=self._mint.mint(region.number, access, expires_s),
            shm_name=region.shm_name,
        )

    def claim(self, number: int, capability: bytes, access: Access) -> Grant:
        """Check the right and count a user in, until ``release``.

        Raises:
            AccessDenied: no such region, or not with this capability.
        """
        key = (number, capability, access)
        now_s = self._clock.monotonic()
        expires_s = self._checked.get(key, 0.0)
        if expires_s is not None and expires_s <= now_s:
            expires_s = self._mint.check(number, capability, access, now_s)
            if len(self._checked) >= _MOST_CHECKED:
                self._checked.clear()
            self._checked[key] = expires_s
        with self._lock:
            region = self._regions.get(number)
            if region is None:
                raise AccessDenied("the region is gone", node=self._mint.node)
            self._users[number] = self._users.get(number, 0) + 1
        return Grant(region, expires_s)

    def release(self, grant: Grant) -> None:
        """Count a user out."""
        number = grant.region.number
        with self._lock:
            left = self._users[number] - 1
            if left:
                self._users[number] = left
            else:
                del self._users[number]
                if self._awaited:
                    self._unused.notify_all()

    def retire(self, region: Region) -> None:
        """Deny new users from now on."""
        with self._lock:
            if self._regions.get(region.number) is region:
                del self._regions[region.number]
            self._places = None

    def wait_unused(self, region: Region, timeout_s: float) -> None:
        """Block until no user is left.

        Raises:
            TimedOut: some are left after ``timeout_s``.
        """
        with self._lock:
            self._awaited += 1
            free = self._unused.wait_for(
                lambda: region.number not in self._users, timeout_s
            )
            self._awaited -= 1
        if not free:
            raise TimedOut(f"region {region.name!r} is still in use by peers")


def check_range(offset: int, length: int, size: int, slice_index: int) -> None:
    """Raise OutOfBounds unless ``length`` bytes at ``offset`` lie inside ``size``."""
    if offset < 0 or length < 0 or offset > size or length > size - offset:
        raise OutOfBounds(
            f"{length} bytes at {offset} are not inside a region of {size}",
            slice_index=slice_index,
        )
