"""Who uses a state folder, and which processes it has running.

``run/lock`` is held by the supervisor for life. ``run/id`` is a random word that every
process of one run has in its environment, and so have those that they start: whatever a
killed supervisor left is found by it, and nothing else is. ``run/processes.json`` lists
the processes by name, for people and tests.
"""

import contextlib
import fcntl
import os
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

from kvtide.runtime import ConfigError

RUN_VARIABLE = "_KVTIDE_RUN"
NAME_VARIABLE = "_KVTIDE_NAME"

_PROC = Path("/proc")
_SWEEP_TRIES = 200
_SWEEP_PAUSE_S = 0.05


class Entry(msgspec.Struct, frozen=True):
    """A process that runs."""

    name: str
    pid: int


class Page(msgspec.Struct, frozen=True):
    """``run/processes.json``."""

    supervisor: int
    children: tuple[Entry, ...]


class Ledger:
    """The lock and the run's word of one state folder; a context manager."""

    def __init__(self, state_dir: Path) -> None:
        """Nothing is opened yet."""
        self._folder = state_dir / "run"
        self._lock_fd: int | None = None
        self._children: dict[str, Entry] = {}
        self.run_id = secrets.token_hex(16)

    def __enter__(self) -> Self:
        """Take the lock.

        Raises:
            ConfigError: another supervisor holds it, or the folder can't be used.
        """
        lock = self._folder / "lock"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            message = (
                f"can't use the state folder {self._folder.parent}: {error.strerror}; "
                "choose another one with --state-dir"
            )
            raise ConfigError(message, key="state_dir") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            message = (
                f"another kvtide (process {holder}) uses the state folder "
                f"{self._folder.parent}: stop it, or choose another one with --state-dir"
            )
            raise ConfigError(message, key="state_dir") from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._lock_fd = fd
        return self

    def __exit__(self, *_exc: object) -> None:
        """Let the lock go; the file stays, for removing it would race."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def marks(self, name: str) -> dict[str, str]:
        """What the environment of the process ``name`` must hold."""
        return {RUN_VARIABLE: self.run_id, NAME_VARIABLE: name}

    def record(self, name: str, pid: int) -> None:
        """Note that the process ``name`` runs."""
        self._children[name] = Entry(name, pid)
        self._write_page()

    def strike(self, name: str) -> None:
        """Note that it runs no more."""
        if self._children.pop(name, None) is not None:
            self._write_page()

    def sweep(self, *, pause: Callable[[float], object]) -> tuple[str, ...]:
        """End what the run before left, and write down this run's word.

        Returns the names of what was ended, processes that those had started included.
        ``pause`` waits for some seconds. Only call it while the lock is held.
        """
        path = self._folder / "id"
        names: set[str] = set()
        earlier = ""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            earlier = path.read_text(encoding="ascii").strip()
        if earlier:
            for _ in range(_SWEEP_TRIES):
                found = processes_of(earlier)
                if not found:
                    break
                for pid, name in found.items():
                    names.add(name)
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                pause(_SWEEP_PAUSE_S)
        _replace(path, self.run_id.encode() + b"\n")
        self._write_page()
        return tuple(sorted(names))

    def _write_page(self) -> None:
        page = Page(os.getpid(), tuple(self._children.values()))
        _replace(self._folder / "processes.json", msgspec.json.encode(page))


def _replace(path: Path, content: bytes) -> None:
    """Readers see the old content or the new one."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(content)
    fresh.replace(path)


def processes_of(run_id: str) -> dict[int, str]:
    """The processes of a run, by id, with the names that they run under."""
    mark = f"{RUN_VARIABLE}={run_id}".encode()
    name_mark = f"{NAME_VARIABLE}=".encode()
    found: dict[int, str] = {}
    for folder in _PROC.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # somebody else's, or gone
        if mark not in variables:
            continue
        name = next((v for v in variables if v.startswith(name_mark)), b"")
        found[int(folder.name)] = name.removeprefix(name_mark).decode(errors="replace")
    return found
