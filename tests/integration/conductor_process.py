"""Runs one real conductor until SIGTERM.

``conductor_process.py NODE NATS DIR CATALOG [TENANTS]``; the last are its tenants' limits
as JSON.
"""

import asyncio
import json
import signal
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvtide.conductor.app import serve
from kvtide.conductor.settings import ConductorSettings
from kvtide.runtime import SystemClock


async def main(
    node: str, nats: str, state_dir: str, catalog: str, tenants: str = "{}"
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    settings = ConductorSettings(
        node=node,
        nats=nats,
        state_dir=Path(state_dir),
        catalog=catalog,
        tenants=json.loads(tenants),
    )
    await serve(settings, stop=stop, registry=CollectorRegistry(), clock=SystemClock())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
