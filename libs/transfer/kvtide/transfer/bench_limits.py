"""What this machine can do at most: plain copies, and plain sockets; see ``bench``."""

import ctypes
import mmap
import socket

import xxhash

from kvtide.transfer.bench_figures import Candidate, size_text
from kvtide.transfer.buffers import address_of

ARENA_BYTES = 256 << 20
MANY = 8
"""Requests in flight at once, where several are."""


def memcpy_limits(size: int) -> list[Candidate]:
    """A copy between two arenas, and a copy that is hashed after, one thread each."""
    source, target = Arena(), Arena()
    places = Places(size)

    def copy() -> int:
        at = places.next()
        ctypes.memmove(target.address + at, source.address + at, size)
        return size

    def copy_and_hash() -> int:
        at = places.next()
        ctypes.memmove(target.address + at, source.address + at, size)
        xxhash.xxh3_64_intdigest(target.view[at : at + size])
        return size

    return [
        Candidate(f"memcpy {size_text(size)}", "limit", "copy", size, copy),
        Candidate(
            f"memcpy + xxh3 {size_text(size)}", "limit", "copy", size, copy_and_hash
        ),
    ]


class Arena:
    """Memory that is touched and aligned, as that of tensors is."""

    def __init__(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.view = memoryview(mmap.mmap(-1, ARENA_BYTES, flags=flags))
        self.address = address_of(self.view)
        ctypes.memset(self.address, 7, ARENA_BYTES)


class Places:
    """Offsets that walk through the arena, so that caches do not flatter."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0

    def next(self) -> int:
        """Where the next transfer begins."""
        at = self._at
        self._at = at + self._size
        if self._at + self._size > ARENA_BYTES:
            self._at = 0
        return at


class BareSocket:
    """A loop over one plain socket to the owner's process: 8 bytes ask for a size."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._into = Arena().view

    def candidates(self, size: int) -> list[Candidate]:
        """The stream with requests in flight, as a limit; and the round trip."""
        places = Places(size)
        ask = size.to_bytes(8, "little")

        def fetch() -> None:
            at = places.next()
            got = 0
            while got < size:
                part = self._into[at + got : at + size]
                got += self._sock.recv_into(part, 0, socket.MSG_WAITALL)

        def one() -> int:
            self._sock.sendall(ask)
            fetch()
            return size

        def many() -> int:
            self._sock.sendall(ask * MANY)
            for _ in range(MANY):
                fetch()
            return size * MANY

        name = f"bare socket {size_text(size)}"
        return [
            Candidate(f"{name} x{MANY}", "limit", "read", size, many),
            Candidate(name, "limit", "read", size, one),
            Candidate(f"{name} round trip", "limit", "read", size, one, "us"),
        ]

    def close(self) -> None:
        """Hang up."""
        self._sock.close()


def serve_bare(listener: socket.socket, arena: memoryview) -> None:
    """The other end of ``BareSocket``, until the listener is closed."""
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with sock:
            places: dict[int, Places] = {}
            while ask := sock.recv(8, socket.MSG_WAITALL):
                size = int.from_bytes(ask, "little")
                at = places.setdefault(size, Places(size)).next()
                sock.sendall(arena[at : at + size])
