"""Who this process is: its node's name and the number of this life."""

import os
import threading
from pathlib import Path

from kvtide.bus.errors import EpochError
from kvtide.kv import NodeId, NodeRef
from kvtide.runtime import Clock


class EpochFile:
    """Keeps a node's newest epoch in ``FOLDER/epochs/NODE``, so that it only grows."""

    def __init__(self, state_dir: Path, node: NodeId, clock: Clock) -> None:
        """Nothing is read or written yet."""
        self._path = state_dir.expanduser() / "epochs" / node
        self._clock = clock

    def next(self, current: int) -> int:
        """A new epoch, greater than all before, kept before it is returned.

        It is the wall clock in milliseconds unless that is not greater: a node whose
        file was lost still gets a greater one.

        Raises:
            EpochError: the file can't be read or written.
        """
        try:
            epoch = max(self._read() + 1, current + 1, int(self._clock.wall() * 1000))
            self._write(epoch)
        except (OSError, ValueError) as error:
            raise EpochError(
                f"the epoch of this node can't be kept in {self._path}: {error}",
                path=str(self._path),
            ) from error
        return epoch

    def _read(self) -> int:
        try:
            return int(self._path.read_text(encoding="ascii"))
        except FileNotFoundError:
            return 0

    def _write(self, epoch: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with fresh.open("w", encoding="ascii") as file:
            file.write(f"{epoch}\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)


class Identity:
    """The holder of this process's ``NodeRef``; it changes when the process is fenced.

    Safe to use from any thread.
    """

    def __init__(self, node: NodeId, epoch: int, file: EpochFile | None = None) -> None:
        """Without a file epochs grow in memory only: for tests."""
        self._lock = threading.Lock()
        self._file = file
        self._current = NodeRef(node, epoch)

    @classmethod
    def open(cls, node: NodeId, state_dir: Path, clock: Clock) -> "Identity":
        """Begin a new life of ``node``.

        Raises:
            EpochError: the file can't be read or written.
        """
        file = EpochFile(state_dir, node, clock)
        return cls(node, file.next(0), file)

    @property
    def current(self) -> NodeRef:
        """Who this process is now."""
        return self._current

    def advance(self) -> NodeRef:
        """Begin a new life: everything that the old one held is given up.

        Raises:
            EpochError: the file can't be written.
        """
        with self._lock:
            old = self._current
            file = self._file
            epoch = old.epoch + 1 if file is None else file.next(old.epoch)
            self._current = NodeRef(old.node, epoch)
            return self._current

    def advance_unkept(self) -> NodeRef:
        """``advance`` when the file fails: greater than before, but not kept."""
        with self._lock:
            old = self._current
            self._current = NodeRef(old.node, old.epoch + 1)
            return self._current
