"""One role in a process of its own: ``python cluster_process.py ROLE SETTINGS_JSON``.

Calls the role's ``serve`` as the command line does. SIGTERM ends it cleanly.
"""

import asyncio
import importlib
import json
import signal
import sys

from kvtide.runtime import SystemClock
from kvtide.runtime.logs import configure_logging
from kvtide.runtime.metrics import new_registry


async def _serve(role: str, given: str) -> None:
    module = importlib.import_module(f"kvtide.{role}.settings")
    settings = getattr(module, f"{role.capitalize()}Settings").model_validate(
        json.loads(given)
    )
    app = importlib.import_module(f"kvtide.{role}.app")
    configure_logging(
        level=settings.log_level, log_format=settings.log_format, node=settings.node
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    registry = new_registry(role=role, node=settings.node, loop=loop)
    await app.serve(settings, stop=stop, registry=registry, clock=SystemClock())


def run_role(role: str, given: str) -> None:
    asyncio.run(_serve(role, given))


if __name__ == "__main__":
    run_role(sys.argv[1], sys.argv[2])
