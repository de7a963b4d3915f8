"""A node in a process of its own, for tests that stop or kill it.

``python bus_process.py NATS_URL NODE STATE_DIR``; prints ``ready``, then each life that
it is fenced into; ends at the end of its input.
"""

import asyncio
import sys

from prometheus_client import CollectorRegistry

from kvtide.bus import open_node
from kvtide.bus.messages import NodeState
from kvtide.kv import Role
from kvtide.runtime import SystemClock
from kvtide.runtime.settings import RoleSettings


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def live(url: str, name: str, state_dir: str) -> None:
    settings = RoleSettings.model_validate(
        {"nats": url, "node": name, "state_dir": state_dir, "shm_dir": None}
    )
    async with open_node(
        settings, [Role.PREFILL], clock=SystemClock(), registry=CollectorRegistry()
    ) as node:
        node.on_fenced(lambda ref: say(f"fenced {ref.epoch}"))
        node.set_state(NodeState.READY)
        say("ready")
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(live(*sys.argv[1:4]))
