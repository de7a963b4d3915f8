"""Files as regions: read and written around the page cache where that is possible.

Direct I/O needs addresses, offsets and lengths in multiples of a block. Memory that is
not aligned so goes through an aligned buffer of ours; a file system that knows no
direct I/O (tmpfs, some network ones) is used through its cache.
"""

import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote_from_bytes, unquote_to_bytes

import xxhash

from kvtide.runtime import Clock
from kvtide.transfer.buffers import address_of, copy_and_hash
from kvtide.transfer.detours import Detours
from kvtide.transfer.errors import (
    AccessDenied,
    Corrupt,
    Refused,
    TransferError,
    Unreachable,
)
from kvtide.transfer.handles import Access, RegionHandle
from kvtide.transfer.mappings import MOST_RIGHTS, AskToMap
from kvtide.transfer.regions import check_range
from kvtide.transfer.requests import Request
from kvtide.transfer.shm import boot_id, close_mapping
from kvtide.transfer.wire import Ask, pack_ask, unpack_mapped

PATH = "file"
PREFIX = "file:"
BLOCK_BYTES = 4096
_BUFFER_BYTES = 1 << 20


class SegmentFile:
    """An open file. Thread-safe; each thread that uses it unaligned has a buffer."""

    def __init__(self, path: Path, *, writable: bool) -> None:
        """Open an existing file.

        Raises:
            Unreachable: there is none, or it can't be opened.
        """
        self.path = path
        self._closed = True
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._cached_fd = os.open(path, flags)
        except OSError as error:
            raise Unreachable(f"cannot open {path}: {error}", path=PATH) from error
        try:
            self._direct_fd: int | None = os.open(path, flags | os.O_DIRECT)
        except OSError:
            self._direct_fd = None
        self._closed = False
        self._buffers = threading.local()

    @property
    def direct(self) -> bool:
        """Whether the file system lets us go around its cache."""
        return self._direct_fd is not None

    def name(self) -> str:
        """What others find and recognise the file by: ASCII, whatever its path is of."""
        found = os.fstat(self._cached_fd)
        path = quote_from_bytes(os.fsencode(self.path))
        # another machine may well have the same numbers
        return f"{PREFIX}{boot_id()}:{found.st_dev}:{found.st_ino}:{path}"

    def length(self) -> int:
        """Bytes now."""
        return os.fstat(self._cached_fd).st_size

    def map(self, length: int, *, writable: bool) -> mmap.mmap:
        """The file as memory, through the cache."""
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return mmap.mmap(self._cached_fd, length, access=access)

    def read_into(
        self, target: memoryview, offset: int, stop: Callable[[], bool]
    ) -> int:
        """Fill ``target`` from ``offset`` on; xxh3_64 of what lies in it then.

        ``stop`` is asked from time to time; when true the rest is left undone.

        Raises:
            Corrupt: the file ends before.
            Unreachable: the device reports an error.
        """
        try:
            if self._direct_fd is None:
                return self._read_cached(target, offset, stop)
            return self._read_direct(self._direct_fd, target, offset, stop)
        except OSError as error:
            raise Unreachable(f"reading {self.path}: {error}", path=PATH) from error

    def write_from(self, source: memoryview, offset: int) -> int:
        """Write ``source`` at ``offset``; its xxh3_64.

        The bytes are visible to readers; they are durable after ``sync``.

        Raises:
            Unreachable: the device reports an error or is full.
        """
        aligned = not (offset | len(source) | address_of(source)) % BLOCK_BYTES
        fd = self._cached_fd
        if aligned and self._direct_fd is not None:
            fd = self._direct_fd
        at = 0
        try:
            while at < len(source):
                at += os.pwritev(fd, [source[at:]], offset + at)
        except OSError as error:
            raise Unreachable(f"writing {self.path}: {error}", path=PATH) from error
        return xxhash.xxh3_64_intdigest(source)

    def reserve(self, offset: int, length: int) -> None:
        """Have room for a range on the device; raises OSError when there is none."""
        os.posix_fallocate(self._cached_fd, offset, length)

    def sync(self) -> None:
        """Have what was written survive a power cut; blocks.

        Raises:
            Unreachable: the device reports an error: treat the file as lost.
        """
        try:
            os.fdatasync(self._cached_fd)
        except OSError as error:
            raise Unreachable(f"syncing {self.path}: {error}", path=PATH) from error

    def close(self) -> None:
        """Close it; nobody may be using it. It is closed too when nobody holds it."""
        if not self._closed:
            self._closed = True
            os.close(self._cached_fd)
            if self._direct_fd is not None:
                os.close(self._direct_fd)

    def __del__(self) -> None:
        self.close()

    def _read_cached(
        self, target: memoryview, offset: int, stop: Callable[[], bool]
    ) -> int:
        at = 0
        while at < len(target) and not stop():
            part = target[at : at + _BUFFER_BYTES]
            got = os.preadv(self._cached_fd, [part], offset + at)
            self._must_have(got)
            at += got
        return xxhash.xxh3_64_intdigest(target)

    def _read_direct(
        self, fd: int, target: memoryview, offset: int, stop: Callable[[], bool]
    ) -> int:
        digest = xxhash.xxh3_64()
        buffer = self._buffer()
        at = 0
        while at < len(target) and not stop():
            first = (offset + at) % BLOCK_BYTES
            want = min(first + len(target) - at, len(buffer))
            whole = -(-want // BLOCK_BYTES) * BLOCK_BYTES
            got = os.preadv(fd, [buffer[:whole]], offset + at - first)
            size = min(got, want) - first
            self._must_have(size)
            part = target[at : at + size]
            copy_and_hash(part, buffer[first : first + size], stop)
            digest.update(part)
            at += size
        return digest.intdigest()

    def _must_have(self, size: int) -> None:
        if size <= 0:
            raise Corrupt(f"{self.path} ends before its region", path=PATH)

    def _buffer(self) -> memoryview:
        view: memoryview | None = getattr(self._buffers, "view", None)
        if view is None:
            # anonymous maps start at a page
            view = memoryview(mmap.mmap(-1, _BUFFER_BYTES))
            self._buffers.view = view
        return view


@dataclass(frozen=True, slots=True)
class OpenRegion:
    """A peer's region as a file of ours, until when (None: for ever)."""

    file: SegmentFile
    length: int
    expires_s: float | None

    def ended(self, now_s: float) -> bool:
        """Whether the right to it is over."""
        return self.expires_s is not None and self.expires_s <= now_s


class FileMover:
    """Moves pieces between memory and a peer's files that this process can see too."""

    path = PATH

    def __init__(self, node: str, clock: Clock, ask: AskToMap) -> None:
        """Ask the owner for the right through ``ask``."""
        self._node = node
        self._clock = clock
        self._ask = ask
        self._here = f"{PREFIX}{boot_id()}:"
        self.detours = Detours(node, PATH, clock)
        self._lock = threading.Lock()
        self._rights: dict[tuple[int, bytes, bool], OpenRegion] = {}
        # one for all the rights to a region: a right may be new for every transfer
        self._files: dict[tuple[int, bool], SegmentFile] = {}

    def near(self, name: str) -> bool:
        """Whether a file of this name may be here: it is of this host."""
        return name.startswith(self._here)

    def move(self, request: Request, *, alone: bool) -> list[int]:
        """See ``copier.Mover``."""
        del alone
        transfer = request.transfer
        digests: list[int] = []
        for at, view in enumerate(request.views):
            handle, offset = request.handles[at], request.offsets[at]
            try:
                found = self._open(handle, writable=request.writes)
                check_range(offset, len(view), found.length, at)
                if request.writes:
                    digest = found.file.write_from(view, offset)
                else:
                    digest = found.file.read_into(view, offset, transfer.hopeless)
            except TransferError as error:
                error.slice_index = request.slice_index(at)
                raise
            digests.append(digest)
            if transfer.hopeless():
                break
        return digests

    def reaches(self, handle: RegionHandle, *, writable: bool) -> bool:
        """Whether the file is here as the owner has it; blocks at the first time.

        Raises:
            TransferError: the owner does not allow it.
        """
        if (handle, writable) in self.detours:
            return False
        try:
            self._open(handle, writable=writable)
        except Refused as error:
            self.detours.add(handle.region, writes=writable, reason=error)
            return False
        except Unreachable:
            # the network tries for longer
            return False
        return True

    def forget(self, region: int) -> None:
        """The owner took the region back."""
        self.detours.forget(region)
        with self._lock:
            # whoever reads one now keeps it open until it is done
            for writable in (False, True):
                self._files.pop((region, writable), None)
            for key in [key for key in self._rights if key[0] == region]:
                del self._rights[key]

    def close(self) -> None:
        """Let go of all files."""
        with self._lock:
            self._files.clear()
            self._rights.clear()

    def known(self, handle: RegionHandle, *, writable: bool) -> bool:
        """See ``copier.Mover``: a device may take its time."""
        del handle, writable
        return False

    def asked(self, handle: RegionHandle, *, writable: bool) -> bool:
        """See ``copier.Mover``."""
        if (handle, writable) in self.detours:
            return True
        with self._lock:
            return (handle.region, handle.capability, writable) in self._rights

    def ask(self, handle: RegionHandle, *, writable: bool) -> None:
        """See ``copier.Mover``; what is not here goes elsewhere, which is no error."""
        self.reaches(handle, writable=writable)

    def _open(self, handle: RegionHandle, *, writable: bool) -> OpenRegion:
        key = (handle.region, handle.capability, writable)
        with self._lock:
            known = self._rights.get(key)
            if known is not None and known.ended(self._clock.monotonic()):
                del self._rights[key]
                raise AccessDenied("the capability has expired", node=self._node)
        if known is not None:
            return known
        access = Access.WRITE if writable else Access.READ
        ask = Ask([key[:2]], [(0, int(access is Access.WRITE), 0)], "map")
        length, left_s, name = unpack_mapped(self._ask(pack_ask(ask)))
        if not name.startswith(PREFIX):
            raise Refused("the region is no file", node=self._node, path=PATH)
        file = self._file(handle.region, name, writable=writable)
        if file.length() < length:
            raise Refused("here the file is shorter", node=self._node, path=PATH)
        expires_s = None if left_s is None else self._clock.monotonic() + left_s
        found = OpenRegion(file, length, expires_s)
        with self._lock:
            if len(self._rights) >= MOST_RIGHTS:
                del self._rights[next(iter(self._rights))]
            self._rights[key] = found
        return found

    def _file(self, region: int, name: str, *, writable: bool) -> SegmentFile:
        with self._lock:
            known = self._files.get((region, writable))
        if known is not None:
            return known
        path = Path(os.fsdecode(unquote_to_bytes(name.split(":", 4)[-1])))
        try:
            file = SegmentFile(path, writable=writable)
        except Unreachable as error:
            raise Refused(error.message, node=self._node, path=PATH) from error
        if file.name() != name:
            file.close()
            raise Refused("here the file is another", node=self._node, path=PATH)
        with self._lock:
            return self._files.setdefault((region, writable), file)


@dataclass(frozen=True, slots=True)
class FileBacking:
    """A file that is registered as a region."""

    file: SegmentFile
    mapping: mmap.mmap

    def commit(self, offset: int, length: int) -> None:
        """Have room on the device; raises OSError when there is none."""
        self.file.reserve(offset, length)

    def release(self, offset: int, length: int) -> None:
        """Nothing: a file keeps its bytes."""

    def dispose(self) -> None:
        """Let go of the file."""
        close_mapping(self.mapping)
        self.file.close()


def file_region(path: Path, *, writable: bool) -> FileBacking:
    """A file as memory to register.

    Raises:
        Unreachable: it can't be opened.
        TransferError: it is empty.
    """
    file = SegmentFile(path.absolute(), writable=writable)
    length = file.length()
    if not length:
        file.close()
        raise TransferError(f"{path} is empty", path=PATH)
    return FileBacking(file, file.map(length, writable=writable))
