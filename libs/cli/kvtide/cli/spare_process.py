"""The process of a spare worker: load the model, wait for an order, become a worker.

``python -m kvtide.cli.spare_process WORDS…``: the words of a worker's command line, by
whose settings the model is loaded. One line on standard input is the order; its end
without one ends the process.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import CollectorRegistry
from rich.console import Console

from kvtide.cli.exits import CLEAN, exit_code
from kvtide.cli.resolve import resolve
from kvtide.cli.roles import ROLES
from kvtide.cli.running import run_process
from kvtide.cli.settings import wait_passively
from kvtide.cli.supervisor.spare import Order
from kvtide.runtime import SystemClock
from kvtide.runtime.logs import configure_logging
from kvtide.runtime.settings import RoleSettings

if TYPE_CHECKING:
    from kvtide.engine.settings import WorkerSettings

WORKERS = ("prefill", "decode")
SAME = ("model", "cache_dir", "threads", "dtype", "device")
"""Settings that decide what is loaded."""


def main(words: Sequence[str]) -> int:
    """Run; the exit code of the worker that it became."""
    return exit_code(lambda: _run(words), Console(stderr=True))


def _run(words: Sequence[str]) -> int:
    wait_passively()
    settings = _settings(words)
    configure_logging(
        level=settings.log_level, log_format=settings.log_format, node="spare"
    )
    from kvtide.engine.worker import read_model  # noqa: PLC0415 - it loads torch

    for role in WORKERS:
        ROLES[role].serve()
    loaded = read_model(settings)
    line = sys.stdin.buffer.readline()
    if not line.strip():
        loaded.close()
        return CLEAN
    order = msgspec.json.decode(line, type=Order)
    _write_to(order.log)
    own = _settings(order.words)
    same = all(getattr(own, key) == getattr(settings, key) for key in SAME)
    serve = ROLES[order.words[0]].serve()
    if not same:
        loaded.close()

    async def serving(stop: asyncio.Event, registry: CollectorRegistry) -> None:
        await serve(
            own,
            stop=stop,
            registry=registry,
            clock=SystemClock(),
            loaded=loaded if same else None,
        )

    return run_process(order.words[0], own, serving)


def _settings(words: Sequence[str]) -> "WorkerSettings":
    """The settings that a command line of a role with ``--key value`` flags means.

    Raises:
        ConfigError: a setting is wrong.
    """
    from kvtide.engine.settings import WorkerSettings  # noqa: PLC0415

    role, *rest = words
    pairs = zip(rest[::2], rest[1::2], strict=True)
    flags: dict[str, object] = {
        flag.removeprefix("--").replace("-", "_"): value for flag, value in pairs
    }
    config = flags.pop("config", None)
    path = Path(str(config)) if config is not None else None
    found: RoleSettings = resolve(ROLES[role].settings_class(), role, path, flags)
    if not isinstance(found, WorkerSettings):
        raise TypeError(f"{role} is no worker")
    return found


def _write_to(path: str) -> None:
    """Output goes on in the log of whom this process is now."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for own in (1, 2):
        os.dup2(fd, own)
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
