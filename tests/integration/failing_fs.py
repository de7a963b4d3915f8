"""A file system whose reads and writes can be made to fail: FUSE by the kernel's protocol.

``python failing_fs.py MOUNTPOINT FOLDER`` mounts ``FOLDER`` through it until it is
killed. A file ``FOLDER/.fail`` with the words ``read`` and ``write`` in it makes those
calls fail with EIO. It speaks to ``/dev/fuse`` itself, so it needs no library, but root.
"""

import ctypes
import errno
import os
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path

IN = struct.Struct("<IIQQIIII")
OUT = struct.Struct("<IiQ")
ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
MAX_WRITE = 1 << 20
DIRECT_IO = 1
ROOT_NODE = 1


class Refused(Exception):  # noqa: N818 - becomes an error number
    """The call fails with this number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class FailingFs:
    """Nodes are paths; open files are descriptors of the files in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: dict[int, Path] = {ROOT_NODE: folder}
        self.nodes: dict[Path, int] = {folder: ROOT_NODE}
        self.calls: dict[int, Callable[[int, bytes], bytes]] = {
            1: self.lookup,
            3: self.getattr,
            4: self.setattr,
            9: self.mkdir,
            10: self.unlink,
            12: self.rename,
            14: self.open,
            15: self.read,
            16: self.write,
            17: self.statfs,
            18: self.release,
            20: self.fsync,
            25: self.flush,
            26: self.init,
            27: self.opendir,
            28: self.readdir,
            29: self.release,
            30: self.fsync,
            35: self.create,
            45: self.rename2,
        }

    def check(self, call: str) -> None:
        """Fail if calls of this kind shall fail now."""
        control = self.folder / ".fail"
        if control.exists() and call in control.read_text():
            raise Refused(errno.EIO)

    def entry(self, path: Path) -> bytes:
        attributes = self.attributes(path)
        node = self.nodes.setdefault(path, len(self.nodes) + 1)
        self.paths[node] = path
        return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + attributes

    def attributes(self, path: Path) -> bytes:
        s = path.lstat()
        node = self.nodes.setdefault(path, len(self.nodes) + 1)
        times = (int(s.st_atime), int(s.st_mtime), int(s.st_ctime), 0, 0, 0)
        owner = (s.st_mode, s.st_nlink, s.st_uid, s.st_gid, 0, 4096, 0)
        return ATTR.pack(node, s.st_size, s.st_blocks, *times[:3], *times[3:], *owner)

    def child(self, node: int, name: bytes) -> Path:
        return self.paths[node] / name.rstrip(b"\0").decode()

    # ---- calls, by the kernel's names

    def init(self, _node: int, body: bytes) -> bytes:
        major, minor, readahead, _flags = struct.unpack_from("<IIII", body)
        return struct.pack(
            "<IIIIHHIIHHI28x",
            *(major, min(minor, 31), readahead, 1 << 5),  # big writes
            *(16, 12, MAX_WRITE, 1, 256, 0, 0),
        )

    def lookup(self, node: int, body: bytes) -> bytes:
        return self.entry(self.child(node, body))

    def getattr(self, node: int, _body: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self.attributes(self.paths[node])

    def setattr(self, node: int, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        if valid & 8:
            self.check("write")
            os.truncate(self.paths[node], size)
        return self.getattr(node, body)

    def mkdir(self, node: int, body: bytes) -> bytes:
        path = self.child(node, body[8:])
        path.mkdir()
        return self.entry(path)

    def unlink(self, node: int, body: bytes) -> bytes:
        self.check("write")
        self.child(node, body).unlink()
        return b""

    def rename(self, node: int, body: bytes) -> bytes:
        return self.moved(node, struct.unpack_from("<Q", body)[0], body[8:])

    def rename2(self, node: int, body: bytes) -> bytes:
        return self.moved(node, struct.unpack_from("<Q", body)[0], body[16:])

    def moved(self, node: int, to: int, names: bytes) -> bytes:
        self.check("write")
        old, new, *_ = names.split(b"\0")
        source, target = self.child(node, old), self.child(to, new)
        source.rename(target)
        number = self.nodes.pop(source, None)
        if number is not None:
            self.nodes[target], self.paths[number] = number, target
        return b""

    def open(self, node: int, body: bytes) -> bytes:
        flags = struct.unpack_from("<I", body)[0] & os.O_ACCMODE
        return struct.pack("<QII", os.open(self.paths[node], flags), DIRECT_IO, 0)

    def create(self, node: int, body: bytes) -> bytes:
        self.check("write")
        flags, mode = struct.unpack_from("<II", body)
        path = self.child(node, body[16:])
        access = flags & os.O_ACCMODE
        fd = os.open(path, access | os.O_CREAT, stat.S_IMODE(mode))
        return self.entry(path) + struct.pack("<QII", fd, DIRECT_IO, 0)

    def opendir(self, _node: int, _body: bytes) -> bytes:
        return struct.pack("<QII", os.open("/dev/null", os.O_RDONLY), 0, 0)

    def readdir(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        names = sorted(path.name for path in self.paths[node].iterdir())
        found = b""
        for number, name in enumerate(names[offset:], offset + 1):
            raw = name.encode()
            piece = struct.pack("<QQII", number + 1000, number, len(raw), 8) + raw
            piece += bytes(-len(piece) % 8)
            if len(found) + len(piece) > size:
                break
            found += piece
        return found

    def read(self, _node: int, body: bytes) -> bytes:
        self.check("read")
        fd, offset, size = struct.unpack_from("<QQI", body)
        return os.pread(fd, size, offset)

    def write(self, _node: int, body: bytes) -> bytes:
        self.check("write")
        fd, offset, size = struct.unpack_from("<QQI", body)
        return struct.pack("<II", os.pwrite(fd, body[40 : 40 + size], offset), 0)

    def release(self, _node: int, body: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def fsync(self, _node: int, _body: bytes) -> bytes:
        self.check("write")
        return b""

    def flush(self, _node: int, _body: bytes) -> bytes:
        return b""

    def statfs(self, _node: int, _body: bytes) -> bytes:
        s = os.statvfs(self.folder)
        counts = (s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree)
        return struct.pack("<QQQQQIIII24x", *counts, 4096, 255, 4096, 0)

    # ---- the loop

    def serve(self, fd: int) -> None:
        while True:
            request = os.read(fd, MAX_WRITE + (64 << 10))
            _, opcode, unique, node, *_ = IN.unpack_from(request)
            if opcode in (2, 36, 42):  # forgets and interrupts have no answer
                continue
            number, answer = 0, b""
            call = self.calls.get(opcode, unknown)
            try:
                answer = call(node, request[IN.size :])
            except Refused as refused:
                number = refused.number
            except OSError as error:
                number = error.errno or errno.EIO
            os.write(fd, OUT.pack(OUT.size + len(answer), -number, unique) + answer)


def unknown(_node: int, _body: bytes) -> bytes:
    raise Refused(errno.ENOSYS)


def main() -> None:
    mountpoint, folder = Path(sys.argv[1]), Path(sys.argv[2])
    fd = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other"
    done = libc.mount(
        b"failing", str(mountpoint).encode(), b"fuse", 0, options.encode()
    )
    if done != 0:
        raise OSError(ctypes.get_errno(), "mount")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    FailingFs(folder).serve(fd)


if __name__ == "__main__":
    main()
