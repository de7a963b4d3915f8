"""The directory of the tier: whose it is, its lock, its segments, what is deleted.

::

    DIR/lock          held exclusively by the process that uses the directory
    DIR/superblock    whose it is (see ``format``)
    DIR/deleted       tenants and models whose blocks are deleted, JSON lines
    DIR/removed       single blocks that are removed, JSON lines
    DIR/sealed        there if records are sealed: what names the key that tenants'
                      keys are wrapped with (see ``sealing``)
    DIR/<number>.seg  segments, the number in sixteen hex digits

Used in threads: everything here may block.
"""

import errno
import fcntl
import json
import mmap
import os
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtide.kv import BlockKey
from kvtide.store.ssd.deletions import MAX_KEYS
from kvtide.store.ssd.errors import FormatError, WrongDirectory
from kvtide.store.ssd.events import DeletedSpace
from kvtide.store.ssd.format import (
    DIRECTORY_ID_BYTES,
    PAGE_BYTES,
    Superblock,
    sealed_tail,
    seed_of,
    segment_page,
)

SUFFIX = ".seg"
DIGITS = re.compile("[0-9a-f]{16}")
READ_ONLY_ERRORS = (errno.EROFS, errno.EACCES, errno.EPERM)
MAX_DELETED = 65_536
_DAMAGED = (ValueError, TypeError, OverflowError, RecursionError)


class Directory:
    """An open directory, locked until ``close``.

    Attributes:
        direct: whether its files are read and written past the page cache.
    """

    def __init__(self, path: Path, node: str, key_id: int) -> None:
        """Lock it; make it if it is not there.

        Raises:
            WrongDirectory: it is another node's, of another format, or another
                process holds it.
            OSError: it can't be read.
        """
        self.path = path
        self.direct = False
        path.mkdir(parents=True, exist_ok=True)
        self._lock_fd = _locked(path / "lock")
        try:
            found = self._superblock(node, key_id)
            self.id = found.directory
            self.seed = seed_of(found.directory)
            self.direct = self._try_direct()
        except BaseException:
            os.close(self._lock_fd)
            raise

    def close(self) -> None:
        """Let go of the lock."""
        os.close(self._lock_fd)

    # ---- whose it is

    def _superblock(self, node: str, key_id: int) -> Superblock:
        path = self.path / "superblock"
        try:
            found = Superblock.decode(path.read_bytes())
        except FileNotFoundError:
            return self._begin(node, key_id)
        except FormatError as error:
            raise WrongDirectory(f"{path}: {error}", path=str(path)) from error
        if found.node != node:
            raise WrongDirectory(
                f"{self.path} is the SSD directory of node {found.node!r}, not of "
                f"{node!r}: give each store an ssd_dir of its own",
                path=str(self.path),
            )
        if found.key_id != key_id:
            # blocks under the keys of another secret: nobody can ask for them
            return self._begin(node, key_id)
        return found

    def _begin(self, node: str, key_id: int) -> Superblock:
        for number in self.numbers():
            self.drop(number)
        made = Superblock(node, key_id, os.urandom(DIRECTORY_ID_BYTES))
        self._replace("superblock", made.encode())
        return made

    def probe(self) -> None:
        """Whether the directory can be read at all.

        Raises:
            OSError: it can't.
        """
        with self._file("superblock", os.O_RDONLY) as fd:
            read_all(fd, memoryview(mmap.mmap(-1, PAGE_BYTES)), 0)

    def _try_direct(self) -> bool:
        self.direct = True
        try:
            with self._file("superblock", os.O_RDONLY) as fd:
                buffer = memoryview(mmap.mmap(-1, PAGE_BYTES))
                return os.preadv(fd, [buffer], 0) == PAGE_BYTES
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOTSUP):
                return False
            raise

    # ---- segments

    def numbers(self) -> list[int]:
        """The segments that are here, ascending."""
        found: list[int] = []
        with os.scandir(self.path) as entries:
            for entry in entries:
                stem, dot, suffix = entry.name.partition(".")
                if dot + suffix == SUFFIX and DIGITS.fullmatch(stem):
                    found.append(int(stem, 16))
        return sorted(found)

    @contextmanager
    def segment(self, number: int, *, write: bool = False) -> Generator[int]:
        """A segment's file descriptor; made if it is to be written."""
        flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
        with self._file(f"{number:016x}{SUFFIX}", flags) as fd:
            yield fd

    def begin_segment(self, fd: int, number: int, buffer: memoryview) -> None:
        """Write a new segment's first page."""
        write_all(fd, _into(buffer, segment_page(self.id, number)), 0)

    def seal(self, number: int, tail: int, buffer: memoryview) -> None:
        """Make a segment durable; ``tail`` is its length from now on."""
        with self.segment(number, write=True) as fd:
            os.ftruncate(fd, tail)
            os.fdatasync(fd)
            write_all(fd, _into(buffer, segment_page(self.id, number, tail)), 0)
            os.fdatasync(fd)
        self._sync()

    def sealed_tail(self, fd: int, number: int, buffer: memoryview) -> int:
        """The length of a sealed segment; 0: it was being written."""
        got = os.preadv(fd, [buffer[:PAGE_BYTES]], 0)
        return sealed_tail(bytes(buffer[:got]), self.id, number)

    def drop(self, number: int) -> None:
        """Remove a segment."""
        (self.path / f"{number:016x}{SUFFIX}").unlink(missing_ok=True)

    # ---- what is deleted

    def deleted(self) -> list[DeletedSpace]:
        """What ``note_deleted`` kept.

        Raises:
            WrongDirectory: it can't be told: blocks that are deleted might come back.
        """
        try:
            raw = (self.path / "deleted").read_bytes()
        except FileNotFoundError:
            return []
        try:
            return [_deleted(line) for line in raw.splitlines()]
        except _DAMAGED as error:
            raise WrongDirectory(
                f"{self.path / 'deleted'} says which tenants' blocks are deleted, and is "
                "damaged: remove the whole directory, or that file if no block in it "
                "belongs to a deleted tenant or model",
                path=str(self.path),
            ) from error

    def note_deleted(self, deleted: DeletedSpace) -> None:
        """Keep it; one that says the same until a later time replaces an earlier one."""
        kept = {(each.tenant, each.model): each for each in self.deleted()}
        kept.pop((deleted.tenant, deleted.model), None)
        kept[deleted.tenant, deleted.model] = deleted
        lines = [
            json.dumps([_hex(each.tenant), _hex(each.model), each.until_ms]) + "\n"
            for each in list(kept.values())[-MAX_DELETED:]
        ]
        self._replace("deleted", "".join(lines).encode("ascii"))

    def removed(self) -> dict[BlockKey, int]:
        """What ``note_removed`` kept: until when each block's records do not count.

        Raises:
            WrongDirectory: it can't be told: blocks that are removed might come back.
        """
        try:
            raw = (self.path / "removed").read_bytes()
        except FileNotFoundError:
            return {}
        try:
            lines = [json.loads(line) for line in raw.splitlines()]
            return {
                BlockKey(bytes.fromhex(key)): int(until_ms) for key, until_ms in lines
            }
        except _DAMAGED as error:
            raise WrongDirectory(
                f"{self.path / 'removed'} says which blocks are removed, and is "
                "damaged: remove the whole directory, or that file if they may come back",
                path=str(self.path),
            ) from error

    def note_removed(self, keys: Sequence[BlockKey], until_ms: int) -> None:
        """Keep that these blocks are removed; the latest are kept if they are many."""
        kept = self.removed()
        for key in keys:
            kept.pop(key, None)
            kept[key] = until_ms
        lines = [
            json.dumps([key.hex(), until]) + "\n"
            for key, until in list(kept.items())[-MAX_KEYS:]
        ]
        self._replace("removed", "".join(lines).encode("ascii"))

    def note_wrapping(self, kek_id: str) -> None:
        """Keep which key the tenants' keys are wrapped with.

        Raises:
            WrongDirectory: it is another one already.
        """
        known = wrapping_of(self.path)
        if known not in (None, kek_id):
            raise WrongDirectory(wrapped_otherwise(self.path), path=str(self.path))
        if known is None:
            self._replace("sealed", kek_id.encode("ascii") + b"\n")

    # ---- inside

    @contextmanager
    def _file(self, name: str, flags: int) -> Generator[int]:
        direct = os.O_DIRECT if self.direct else 0
        fd = os.open(self.path / name, flags | direct | os.O_CLOEXEC, 0o600)
        try:
            yield fd
        finally:
            os.close(fd)

    def _replace(self, name: str, content: bytes) -> None:
        fresh = self.path / f".{name}.new"
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path / name)
        self._sync()

    def _sync(self) -> None:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def wrapping_of(path: Path) -> str | None:
    """What names the key that tenants' keys are wrapped with; None: nothing is sealed.

    Raises:
        OSError: it can't be read.
    """
    try:
        return (path / "sealed").read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        return None


def wrapped_otherwise(path: Path) -> str:
    """What is wrong with a directory whose blocks another key opens, for people."""
    return (
        f"the blocks in {path} are encrypted under another key: give the one that they "
        "were written with (ssd_key_file), or remove the directory"
    )


def read_all(fd: int, buffer: memoryview, offset: int) -> None:
    """Fill ``buffer`` from the file.

    Raises:
        OSError: it can't be read, or ends before (EIO).
    """
    done = 0
    while done < len(buffer):
        got = os.preadv(fd, [buffer[done:]], offset + done)
        if got == 0:
            raise OSError(errno.EIO, f"short read: {done} of {len(buffer)} bytes")
        done += got


def write_all(fd: int, buffer: memoryview, offset: int) -> None:
    """Write all of ``buffer``."""
    done = 0
    while done < len(buffer):
        done += os.pwritev(fd, [buffer[done:]], offset + done)


def _locked(path: Path) -> int:
    # not for writing: that would keep a file system from being made read-only
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in READ_ONLY_ERRORS:
            raise
        # a read-only file system can still be read
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise WrongDirectory(
            "another process holds it: give each store an ssd_dir of its own",
            path=str(path.parent),
        ) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _into(buffer: memoryview, page: bytes) -> memoryview:
    buffer[: len(page)] = page
    return buffer[: len(page)]


def _deleted(line: bytes) -> DeletedSpace:
    tenant, model, until_ms = json.loads(line)
    return DeletedSpace(_bytes(tenant), _bytes(model), int(until_ms))


def _hex(tag: bytes | None) -> str | None:
    return None if tag is None else tag.hex()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)
