"""A worker in reserve: its model is loaded, and it waits to be told who it is.

A worker that is started anew imports and loads for seconds; a spare takes its place in a
fraction of one. There is at most one. It is replaced once every process is ready again.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvtide.cli.supervisor.children import ProcessSpec, kill_group, start_child
from kvtide.cli.supervisor.ledger import Ledger
from kvtide.cli.supervisor.role_logs import RoleLog
from kvtide.runtime import Clock

NAME = "spare"
MOST_FAILURES = 3
"""A spare that ended by itself so often is not started again."""

WRITE_LIMIT_S = 1.0


class Order(msgspec.Struct, frozen=True):
    """Who a spare is to be: a role's command line, and the file for its output."""

    words: tuple[str, ...]
    log: str


@dataclass(frozen=True, slots=True)
class SparePlan:
    """How a spare is started, and whose place it can take."""

    spec: ProcessSpec
    words: dict[str, tuple[str, ...]]
    """By process name: the words of its command line after the program's own."""


class Spare:
    """The one spare of a supervisor, started and ended by it."""

    def __init__(
        self, plan: SparePlan, *, ledger: Ledger, log_folder: Path, clock: Clock
    ) -> None:
        """Nothing is started."""
        self._plan = plan
        self._ledger = ledger
        self._log = RoleLog(log_folder, NAME)
        self._clock = clock
        self._child: asyncio.subprocess.Process | None = None
        self._starting = False
        self._failures = 0
        self._ended = False

    def waits(self) -> bool:
        """Whether there is one, or will be soon, or should be none."""
        child = self._child
        if child is not None and child.returncode is not None:
            self._child = child = None
            self._failures += 1
        given_up = self._ended or self._failures >= MOST_FAILURES
        return given_up or self._starting or child is not None

    async def start(self) -> None:
        """Start one; it gets ready by itself. What fails is tried again later."""
        self._starting = True
        try:
            child = await start_child(
                self._plan.spec, self._log, self._ledger.marks(NAME), orders=True
            )
        except OSError:
            self._failures += 1
            return
        finally:
            self._starting = False
        if self._ended:
            kill_group(child.pid)
            await child.wait()
        else:
            self._child = child

    async def take(self, name: str, log: RoleLog) -> asyncio.subprocess.Process | None:
        """Make it the process ``name``; None: there is none that could be."""
        words = self._plan.words.get(name)
        child = self._child
        if words is None or child is None or child.stdin is None:
            return None
        self._child = None
        if child.returncode is not None:
            self._failures += 1
            return None
        order = msgspec.json.encode(Order(words, str(log.path)))
        try:
            child.stdin.write(order + b"\n")
            async with asyncio.timeout(WRITE_LIMIT_S):
                await child.stdin.drain()
        except (OSError, TimeoutError):
            kill_group(child.pid)
            with contextlib.suppress(ProcessLookupError):
                await child.wait()
            return None
        child.stdin.close()
        return child

    async def end(self) -> None:
        """End it; there will be no other."""
        self._ended = True
        child, self._child = self._child, None
        if child is not None:
            kill_group(child.pid)
            await child.wait()
