"""Runs a role in this process: settings, logs, metrics, signals, exit code."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Generator, Mapping
from pathlib import Path
from typing import cast

import structlog
import uvloop
from prometheus_client import CollectorRegistry

from kvtide.bus.errors import Interrupted
from kvtide.cli.exits import BAD_SETTINGS, CLEAN, FAILED, TEMPORARY
from kvtide.cli.resolve import resolve
from kvtide.cli.roles import ROLES
from kvtide.cli.settings import wait_passively
from kvtide.runtime import ConfigError, KvtideError, SystemClock
from kvtide.runtime.heap import settle_heap
from kvtide.runtime.logs import configure_logging
from kvtide.runtime.metrics import new_registry, version
from kvtide.runtime.settings import RoleSettings

log = structlog.get_logger("kvtide.cli")

SETTLED_S = 5.0
"""After which time a role is taken to have built up what it stands on."""

Serve = Callable[[asyncio.Event, CollectorRegistry], Awaitable[None]]
"""Serves until the event is set; returns after a clean stop."""


def run_process(role: str, settings: RoleSettings, serve: Serve) -> int:
    """Run ``serve`` until SIGTERM or SIGINT; the exit code.

    A second signal ends the process at once.
    """
    configure_logging(
        level=settings.log_level, log_format=settings.log_format, node=settings.node
    )
    log.info("starting", role=role, version=version())
    settle_heap()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        registry = new_registry(role=role, node=settings.node, loop=runner.get_loop())
        try:
            runner.run(_until_signal(serve, registry))
        except Interrupted:
            pass  # stopped before it had begun is a clean stop too
        except (ConfigError, KvtideError, OSError, BaseExceptionGroup) as error:
            return _code_of(error)
    log.info("stopped", role=role)
    return CLEAN


def run_role(name: str, config: Path | None, flags: Mapping[str, object]) -> int:
    """Run a role until a signal; the exit code.

    Raises:
        ConfigError: a setting is wrong.
    """
    entry = ROLES[name]
    settings = resolve(entry.settings_class(), name, config, flags)
    wait_passively()
    serve = entry.serve()

    async def serving(stop: asyncio.Event, registry: CollectorRegistry) -> None:
        await serve(settings, stop=stop, registry=registry, clock=SystemClock())

    return run_process(name, settings, serving)


async def _until_signal(serve: Serve, registry: CollectorRegistry) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def asked(number: signal.Signals) -> None:
        if stop.is_set():
            log.warning("asked to stop again: ending at once")
            sys.stderr.flush()
            signal.raise_signal(signal.SIGKILL)
        log.info("stopping", signal=number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked, number)
    loop.call_later(SETTLED_S, settle_heap)
    await serve(stop, registry)


def _code_of(error: BaseException) -> int:
    """The exit code of what went wrong, said in one line if it was foreseen."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        causes = tuple(_leaves(group))
        if all(isinstance(cause, (KvtideError, OSError)) for cause in causes):
            return max(map(_code_of, causes))
        log.error("failed", exc_info=error)
        return FAILED
    if isinstance(error, ConfigError):
        log.error("bad settings", reason=str(error), key=error.key)
        return BAD_SETTINGS
    log.error("ended", reason=str(error) or type(error).__name__)
    return TEMPORARY


def _leaves(group: BaseExceptionGroup[BaseException]) -> Generator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(cast("BaseExceptionGroup[BaseException]", error))
        else:
            yield error
