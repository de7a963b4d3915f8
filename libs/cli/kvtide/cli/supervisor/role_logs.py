"""The log file of each process: bounded, and read for what a person should see.

Children write with ``O_APPEND``, so a file can be cut while they write: no process
depends on the supervisor reading in time.
"""

import contextlib
import os
import re
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

MAX_LOG_BYTES = 8 * 1024 * 1024
_MOST_READ_BYTES = 64 * 1024
_BAD_LINE = re.compile(
    r"\[(error|critical) *\]|\"level\": ?\"(error|critical)\"|^\[FTL\]|^\[ERR\]"
)


@dataclass(slots=True)
class RoleLog:
    """The file ``<folder>/<name>.log`` and its predecessor ``.log.1``."""

    folder: Path
    name: str
    max_bytes: int = MAX_LOG_BYTES
    _seen: int = field(default=0, init=False)

    @property
    def path(self) -> Path:
        """Where the process writes to."""
        return self.folder / f"{self.name}.log"

    def open(self) -> int:
        """A descriptor for a child's output; the caller closes it. Appends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(
            self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        self._seen = os.fstat(fd).st_size
        return fd

    def news(self) -> list[str]:
        """Error lines since the last call, at most some 64 KiB of file at a time."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                start = min(self._seen, size)
                start = max(start, size - _MOST_READ_BYTES)
                file.seek(start)
                raw = file.read(_MOST_READ_BYTES)
        except OSError:
            return []
        whole = raw[: raw.rfind(b"\n") + 1]
        self._seen = start + len(whole)
        lines = whole.decode(errors="replace").splitlines()
        return [line for line in lines if _BAD_LINE.search(line)]

    def tail(self, lines: int = 15) -> list[str]:
        """The last lines."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _MOST_READ_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        return list(deque(text.splitlines(), maxlen=lines))

    def bound(self) -> None:
        """Keep the file small: past ``max_bytes`` it moves to ``.log.1``."""
        with contextlib.suppress(OSError):
            size = self.path.stat().st_size
            if size <= self.max_bytes:
                return
            old = self.path.with_suffix(".log.1")
            with self.path.open("rb") as file, old.open("wb") as kept:
                file.seek(max(0, size - self.max_bytes))
                while chunk := file.read(1 << 20):
                    kept.write(chunk)
            os.truncate(self.path, 0)
            self._seen = 0
