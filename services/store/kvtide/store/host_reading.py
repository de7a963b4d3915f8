"""Reads how much memory the host, and the control group of this process, have left."""

import re
from collections.abc import Iterator
from pathlib import Path

from kvtide.store.host import HostReading

_KIB = 1024
_UNLIMITED = 1 << 60
_PRESSURE = re.compile(r"^some avg10=(\d+(?:\.\d+)?)", re.MULTILINE)
_MAX_FILE_BYTES = 1 << 16


class HostMemory:
    """The kernel's files, below ``root`` (``/``); what is not there is not known."""

    def __init__(self, root: Path = Path("/")) -> None:
        """Find the control group; nothing else is read yet."""
        self._root = root
        self._groups = tuple(self._find_groups())

    def read(self) -> HostReading:
        """The memory that is left now. Takes well under a millisecond."""
        found = [self._host_bytes(), *map(_group_bytes, self._groups)]
        known = [value for value in found if value is not None]
        pressure = _PRESSURE.search(_text(self._root / "proc/pressure/memory"))
        return HostReading(
            min(known, default=None),
            float(pressure[1]) if pressure is not None else None,
        )

    def total_bytes(self) -> int | None:
        """All memory that the host has, or that the control group may have."""
        found = [_field(self._root / "proc/meminfo", "MemTotal:")]
        found += [_limit(group) for group in self._groups]
        return min((value for value in found if value is not None), default=None)

    def _host_bytes(self) -> int | None:
        return _field(self._root / "proc/meminfo", "MemAvailable:")

    def _find_groups(self) -> Iterator[Path]:
        """The control group of this process and those above it, versions 2 and 1."""
        for line in _text(self._root / "proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                top = self._root / "sys/fs/cgroup"
            elif "memory" in controllers.split(","):
                top = self._root / "sys/fs/cgroup/memory"
            else:
                continue
            group = top / path.lstrip("/")
            # inside a container the path may be that of the host, out of sight
            for each in (group, *group.parents):
                if _limit(each) is not None:
                    yield each
                if each == top:
                    break


def _text(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(_MAX_FILE_BYTES)
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _field(path: Path, name: str) -> int | None:
    """A line such as ``MemAvailable:  123 kB`` or ``inactive_file 123``, in bytes."""
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1]) * (_KIB if words[-1] == "kB" else 1)
    return None


def _limit(group: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = _number(group / name)
        if limit is not None and limit < _UNLIMITED:
            return limit
    return None


def _group_bytes(group: Path) -> int | None:
    """What the group may still take; its file cache is given up first."""
    limit = _limit(group)
    used = _number(group / "memory.current")
    cached = _field(group / "memory.stat", "inactive_file")
    if used is None:
        used = _number(group / "memory.usage_in_bytes")
        cached = _field(group / "memory.stat", "total_inactive_file")
    if limit is None or used is None:
        return None
    return max(0, limit - used + (cached or 0))
