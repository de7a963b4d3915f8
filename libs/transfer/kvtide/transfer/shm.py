"""Shared memory as named files: made, found, mapped and swept.

A file's name says whose it is: ``kvtide-<boot>-<pid>-<start>-<random>`` with the
kernel's boot id, the process and its start time in clock ticks. The owner holds an
``flock`` on its file for life, so that a sweeper in another pid namespace, to whom
every owner looks dead, still leaves it alone.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from kvtide.transfer.buffers import address_of
from kvtide.transfer.errors import OutOfBounds, Refused, Unreachable

_MOUNTS = Path("/proc/self/mountinfo")
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_PAGE_MASK = mmap.PAGESIZE - 1
_PAGE_BITS = mmap.PAGESIZE.bit_length() - 1
_ROOM_BYTES = 256 << 20
_ADDRESSES = (ctypes.c_size_t, ctypes.c_size_t)
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (*_ADDRESSES, ctypes.c_int)
# with the GIL held: what takes a microsecond is no reason to let go of it
_mincore = ctypes.PyDLL(None).mincore
_mincore.argtypes = (*_ADDRESSES, ctypes.c_char_p)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAME = re.compile(r"kvtide-([0-9a-f]{8})-(\d{1,10})-(\d{1,20})-[0-9a-f]{16}")


def boot_id() -> str:
    """The kernel's boot id, without dashes; "" where there is none."""
    try:
        return _BOOT_ID.read_text().strip().replace("-", "")
    except OSError:
        return ""


def shm_host(shm_dir: Path | None) -> str:
    """Who shares this directory's memory; "" when it can't be used."""
    boot = boot_id()
    if shm_dir is None or not boot or not os.access(shm_dir, os.W_OK | os.X_OK):
        return ""
    found = shm_dir.stat()
    text = f"{boot}/{found.st_dev}/{found.st_ino}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _start_ticks(pid: int) -> int | None:
    """When the process started, in ticks since boot; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # the command's name, in parentheses, may hold anything
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file in shared memory that this process made and holds locked."""

    name: str
    fd: int
    mapping: mmap.mmap
    path: Path
    advised_huge: bool = False

    def commit(self, offset: int, length: int) -> None:
        """Have real memory behind a range; raises OSError when there is none."""
        if not (self.advised_huge and self._populate(offset, length)):
            os.posix_fallocate(self.fd, offset, length)

    def _populate(self, offset: int, length: int) -> bool:
        """As ``commit``, through the mapping; false: the kernel is too old for it.

        A file is filled with small pages where the mount leaves it to ``madvise``.
        """
        start = offset - offset % mmap.PAGESIZE
        try:
            self.mapping.madvise(_MADV_POPULATE_WRITE, start, offset + length - start)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise OSError(errno.ENOSPC, "the shared memory is full") from error
        return True

    def release(self, offset: int, length: int) -> None:
        """Give the memory behind a range of whole pages back; it reads as zeros."""
        self.mapping.madvise(mmap.MADV_REMOVE, offset, length)

    def dispose(self) -> None:
        """Take the name away and let go; mappings that exist stay valid."""
        self.path.unlink(missing_ok=True)
        os.close(self.fd)
        close_mapping(self.mapping)


def create(shm_dir: Path, length: int) -> SharedFile:
    """A new zeroed file of ``length`` bytes, not yet committed, mapped and locked.

    Raises:
        OSError: the directory is unusable or has too little space.
    """
    space = os.statvfs(shm_dir)
    if space.f_bavail * space.f_frsize < length:
        message = f"{shm_dir} has less than {length} bytes free"
        raise OSError(28, message)
    for _ in range(16):
        path = shm_dir / _fresh_name()
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # a sweeper may have had it between open and flock
            if os.fstat(fd).st_nlink == 0:
                os.close(fd)
                continue
            os.ftruncate(fd, length)
            mapping = mmap.mmap(fd, length)
            return SharedFile(path.name, fd, mapping, path, _advise(mapping, shm_dir))
        except BlockingIOError:
            os.close(fd)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
    message = f"files in {shm_dir} are swept away as fast as they are made"
    raise OSError(11, message)


def huge_pages(shm_dir: Path) -> str:
    """The ``huge=`` option of the directory's mount: whether it has huge pages.

    ``never`` where it is not set or can't be known.
    """
    device = shm_dir.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in _MOUNTS.read_text(errors="replace").splitlines():
            words = line.split()
            if words[2] == number:
                options = words[-1].split(",")
                found = [text for text in options if text.startswith("huge=")]
                return found[0].removeprefix("huge=") if found else "never"
    return "never"


def _advise(mapping: mmap.mmap, shm_dir: Path) -> bool:
    """Ask for huge pages where the mount leaves it to us; whether it does."""
    if huge_pages(shm_dir) != "advise":
        return False
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return False
    return True


def _fresh_name() -> str:
    pid = os.getpid()
    return f"kvtide-{boot_id()[:8]}-{pid}-{_start_ticks(pid)}-{secrets.token_hex(8)}"


def backed(address: int, length: int, *, write: bool) -> bool:
    """Whether mapped memory can be read, or written, without the process being killed.

    A page of shared memory that nobody has touched, or that was given back, is made by
    the first who touches it: where the file system is full the kernel ends him with
    SIGBUS. Here it makes the pages, or says that it can't, which is false. A kernel
    before 5.14 can't be asked to: true.

    It is so at this moment: see ``Region.release`` for who must see to it that it stays.
    """
    if present(address, length):
        return True
    start = address & ~_PAGE_MASK
    size = address + length - start
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    if not _madvise(start, size, advice):
        return True
    return ctypes.get_errno() == errno.EINVAL


def present(address: int, length: int) -> bool:
    """Whether all pages of mapped memory are there, as they nearly always are.

    The kernel says so to whoever may write to the file, as all who may open ours do.
    """
    start = address & ~_PAGE_MASK
    size = address + length - start
    found = (ctypes.c_char * ((size + _PAGE_MASK) >> _PAGE_BITS))()
    return not _mincore(start, size, found) and b"\0" not in found.raw


def unbacked(length: int, index: int) -> OutOfBounds:
    """What to say of slice ``index`` where ``backed`` is false."""
    return OutOfBounds(
        f"nothing was ever written to some of {length} bytes, or they were given back, "
        "and the shared memory is full",
        slice_index=index,
    )


class Attached:
    """A peer's file as we have it: mapped, and open for scattered reads.

    Whoever uses it holds it: the file is closed with the last that does.
    """

    def __init__(self, fd: int, length: int, access: int) -> None:
        """Map ``fd`` and take it over; raises OSError, ValueError if that fails."""
        self.fd = fd
        self.view = memoryview(mmap.mmap(fd, length, access=access))
        self.address = address_of(self.view)

    def backed(self, offset: int, length: int, *, write: bool) -> bool:
        """As ``backed``, of a range inside."""
        if self._has_room(length):
            return True
        return backed(self.address + offset, length, write=write)

    def present(self, offset: int, length: int) -> bool:
        """Whether all of a range inside can be used without being killed, as it is now."""
        return self._has_room(length) or present(self.address + offset, length)

    def _has_room(self, length: int) -> bool:
        """Whether missing pages could be made, and plenty besides: then no page matters.

        To ask for pages costs more, the more they are: a tenth of a copy was seen.
        """
        space = os.fstatvfs(self.fd)
        return space.f_bavail * space.f_frsize >= length + _ROOM_BYTES

    def __del__(self) -> None:
        """Close the file; views of the mapping stay good."""
        os.close(self.fd)


def attach(shm_dir: Path, name: str, length: int, *, writable: bool) -> Attached:
    """Map a peer's file.

    Raises:
        Refused: the name is not one of ours, or the file is not what was said.
        Unreachable: there is no such file (any more).
    """
    if _NAME.fullmatch(name) is None:
        raise Refused(f"{name!r} is no name of shared memory of ours", path="shm")
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(shm_dir / name, flags)
    except FileNotFoundError as error:
        raise Unreachable("the shared memory is gone", path="shm") from error
    except OSError as error:
        raise Refused(f"cannot open shared memory: {error}", path="shm") from error
    if os.fstat(fd).st_size < length:
        os.close(fd)
        raise Refused("the shared memory is shorter than its region", path="shm")
    return Attached(fd, length, mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)


def close_mapping(mapping: mmap.mmap) -> None:
    """Unmap now, or when the last view of it goes."""
    # where somebody holds a view, the memory goes with it
    with contextlib.suppress(BufferError):
        mapping.close()


def sweep_shm(shm_dir: Path) -> list[str]:
    """Remove what dead processes left in the directory; the names removed.

    A file is removed when its name is ours, its process (boot id, pid and start
    time) is not running, and nobody holds its lock.
    """
    removed: list[str] = []
    boot = boot_id()[:8]
    try:
        names = [path.name for path in shm_dir.iterdir()]
    except OSError:
        return removed
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        owner_boot, pid, start = match.groups()
        if owner_boot == boot and _start_ticks(int(pid)) == int(start):
            continue
        if _remove_unlocked(shm_dir / name):
            removed.append(name)
    return removed


def _remove_unlocked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


@dataclass(frozen=True, slots=True)
class PrivateMemory:
    """Zeroed memory of this process alone."""

    mapping: mmap.mmap

    def commit(self, offset: int, length: int) -> None:
        """Nothing to do: the kernel has promised it."""

    def release(self, offset: int, length: int) -> None:
        """Give the memory behind a range of whole pages back; it reads as zeros."""
        self.mapping.madvise(mmap.MADV_DONTNEED, offset, length)

    def dispose(self) -> None:
        """Let go of it."""
        close_mapping(self.mapping)


def private_memory(length: int) -> PrivateMemory:
    """Memory that nobody else can map."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return PrivateMemory(mmap.mmap(-1, length, flags=flags))
