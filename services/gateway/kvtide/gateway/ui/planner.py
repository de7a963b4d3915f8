"""``kvtide plan`` on what this gateway has lately served, in a process of its own."""

import asyncio
import os
import resource
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvtide.kv import LoggedRequest
from kvtide.runtime import Clock

LIMIT_S = 120.0
MOST_REQUESTS = 2000
MOST_BYTES = 64 << 20
"""Of the log's end that is looked at, and of a report."""

_MEMORY_BYTES = 4 << 30
_NICENESS = 10
_LOOK_S = 0.25
_SAID_CHARS = 2000


class PlanError(Exception):
    """Why there is no plan, in a sentence.

    PlanError
    ├── NothingLoggedError   no log is kept, or nothing is in it yet
    ├── PlanBusyError        one is being made already
    ├── PlanRefusedError     ``kvtide plan`` says what is wrong with the question
    └── PlanEndedError       it took too long, or this gateway ends
    """


class NothingLoggedError(PlanError):
    """There is nothing to plan for."""


class PlanBusyError(PlanError):
    """One at a time."""


class PlanRefusedError(PlanError):
    """The question can't be answered."""


class PlanEndedError(PlanError):
    """There was no answer in time."""


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """The newest ``requests`` of the log, on a cluster in TOML; targets in ms."""

    cluster: str
    requests: int
    rate: float
    ttft_ms: float
    tbt_ms: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The report as a page, and what ``kvtide plan`` said."""

    html: str
    said: str
    requests: int


class Planner:
    """Makes one plan at a time; its process gets little priority and few resources."""

    def __init__(
        self,
        log: Path | None,
        clock: Clock,
        ends: Callable[[], bool],
        *,
        limit_s: float = LIMIT_S,
    ) -> None:
        """``ends`` says whether this gateway is about to end: a plan is given up then."""
        self.log = log
        self._clock = clock
        self._ends = ends
        self._limit_s = limit_s
        self._busy = False

    async def block_tokens(self) -> int | None:
        """Of the log's newest request; None: there is none, or it is no log."""
        if self.log is None:
            return None
        lines = await asyncio.to_thread(newest_lines, self.log, 1)
        try:
            found = msgspec.json.decode(lines[-1], type=LoggedRequest)
        except (IndexError, msgspec.MsgspecError):
            return None
        return found.block_tokens

    async def plan(self, asked: PlanQuestion) -> Plan:
        """Ask ``kvtide plan``.

        Raises:
            PlanError: one of those above.
        """
        if self.log is None:
            raise NothingLoggedError(
                "this gateway keeps no workload log: give it the setting workload_log, "
                "the file to keep it in"
            )
        if self._busy:
            raise PlanBusyError("a plan is being made already: wait for it to end")
        self._busy = True
        try:
            lines = await asyncio.to_thread(newest_lines, self.log, asked.requests)
            if not lines:
                raise NothingLoggedError(
                    f"no request is in the workload log {self.log} yet: send some, "
                    "the Chat page will do"
                )
            with tempfile.TemporaryDirectory(prefix="kvtide-plan-") as folder:
                return await self._ask(asked, lines, Path(folder))
        finally:
            self._busy = False

    async def _ask(self, asked: PlanQuestion, lines: list[bytes], folder: Path) -> Plan:
        trace, cluster = folder / "recent.jsonl", folder / "cluster.toml"
        report = folder / "plan.html"
        await asyncio.to_thread(trace.write_bytes, b"".join(lines))
        await asyncio.to_thread(cluster.write_text, asked.cluster, encoding="utf-8")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvtide.cli", "plan", str(trace), str(cluster)),
            *("--html", str(report), "--requests", str(len(lines))),
            *("--rate", str(asked.rate)),
            *("--ttft-ms", str(asked.ttft_ms), "--tbt-ms", str(asked.tbt_ms)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            start_new_session=True,
        )
        try:
            _hold_down(process.pid, self._limit_s)
            said = await self._answer(process)
        finally:
            await _end(process)
        said = said.replace(f"{folder}{os.sep}", "")
        if process.returncode != 0:
            why = said[-_SAID_CHARS:].removeprefix("error: ").strip()
            raise PlanRefusedError(why or f"kvtide plan ended: {process.returncode}")
        html = await asyncio.to_thread(_text, report)
        return Plan(html, said[-_SAID_CHARS:], len(lines))

    async def _answer(self, process: Process) -> str:
        """What the process says, once it has ended by itself."""
        reading = asyncio.ensure_future(process.communicate())
        deadline_s = self._clock.monotonic() + self._limit_s
        try:
            while not reading.done():
                await asyncio.wait((reading,), timeout=_LOOK_S)
                if self._ends():
                    raise PlanEndedError("this gateway is about to end")
                if self._clock.monotonic() > deadline_s:
                    raise PlanEndedError(
                        f"no plan after {self._limit_s:.0f} s: ask for fewer requests"
                    )
            said, _ = await reading
        finally:
            reading.cancel()
        return said.decode(errors="replace")


def newest_lines(log: Path, count: int) -> list[bytes]:
    """The last whole lines of a log and of the one before it, oldest first."""
    found: deque[bytes] = deque()
    for path in (log, log.with_name(log.name + ".1")):
        lines = _last_lines(path, count - len(found))
        found.extendleft(reversed(lines))
        if len(found) >= count:
            break
    return list(found)


def _last_lines(path: Path, count: int) -> list[bytes]:
    if count <= 0 or not path.is_file():
        return []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - MOST_BYTES)
        file.seek(start)
        if start:
            file.readline()  # the rest of a line
        kept = deque((line for line in file if line.endswith(b"\n")), maxlen=count)
    return list(kept)


def _text(report: Path) -> str:
    with report.open("rb") as file:
        return file.read(MOST_BYTES).decode(errors="replace")


def _hold_down(pid: int, limit_s: float) -> None:
    """Serving comes first; should we be killed, the process ends by itself."""
    cpu_s = int(limit_s) + 1
    try:
        os.setpriority(os.PRIO_PROCESS, pid, _NICENESS)
        resource.prlimit(pid, resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        resource.prlimit(pid, resource.RLIMIT_CPU, (cpu_s, cpu_s))
    except ProcessLookupError:
        pass  # it has ended already, and says why


async def _end(process: Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
