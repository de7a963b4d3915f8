"""Starts and ends processes: each in its own group, on a leash, into its own log."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvtide.cli.supervisor import leash
from kvtide.cli.supervisor.readiness import Probe
from kvtide.cli.supervisor.role_logs import RoleLog


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to keep running, and how to ask it whether it is ready.

    ``environment`` is the whole environment: it holds secrets, so it is not shown.
    ``address`` is what a person sees in the status.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    probe: Probe
    start_stage: int
    stop_stage: int
    address: str = ""


async def start_child(
    spec: ProcessSpec, log: RoleLog, marks: Mapping[str, str], *, orders: bool = False
) -> asyncio.subprocess.Process:
    """Start it, with ``marks`` in its environment, by which it can be found again.

    ``orders``: its standard input is a pipe from here.

    Must run in the main thread: the leash is tied to the thread.

    Raises:
        OSError: the machine can't start another process.
    """
    output = log.open()
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            str(Path(leash.__file__)),
            str(os.getpid()),
            *spec.argv,
            stdin=asyncio.subprocess.PIPE if orders else asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**spec.environment, **marks},
            start_new_session=True,
        )
    finally:
        os.close(output)


def terminate(pid: int) -> None:
    """Ask the process to end."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)  # a stopped process would not hear it


def kill_group(pid: int) -> None:
    """End the process and whatever it started, now."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
