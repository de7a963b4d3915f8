"""A writer that begins a put, never ends it, and scribbles into its slots for ever.

``python pool_writer_process.py NATS SHM_DIR NAME BLOCKS``. Says ``ready`` when it
holds slots. It does on purpose what a client never does: it writes without asking
whether the put is still its own, as a process does that was stopped inside a copy.
"""

import asyncio
import sys
import threading
import time
from pathlib import Path

from prometheus_client import CollectorRegistry
from tests.integration.pool_world import (
    CLUSTER,
    LAYOUT,
    SECRET,
    SPACE,
    keys,
    part_bytes,
    until,
)

from kvtide.bus import Identity, NatsBus, Node
from kvtide.bus.messages import PutBlock
from kvtide.kv import Lease, NodeId, RequestId, Role, SlotRef
from kvtide.pool import PoolClient
from kvtide.runtime import SystemClock
from kvtide.runtime.logs import configure_logging
from kvtide.transfer import Endpoint


def scribble(arena: memoryview, slots: list[SlotRef]) -> None:
    while True:
        for slot in slots:
            arena[slot.offset : slot.offset + slot.length] = b"\xa5" * slot.length
        time.sleep(0.001)


async def write(nats: str, shm_dir: str, name: str, count: int) -> None:
    configure_logging(level="warning", log_format="console", node=name)
    clock = SystemClock()
    identity = Identity(NodeId(name), epoch=1)
    async with (
        Endpoint(
            node=name, epoch=1, secret=SECRET, clock=clock, shm_dir=Path(shm_dir)
        ) as endpoint,
        await NatsBus.open(
            nats, identity, cluster=CLUSTER, clock=clock, endpoint=endpoint
        ) as bus,
        Node(
            roles=(Role.PREFILL,),
            bus=bus,
            endpoint=endpoint,
            identity=identity,
            clock=clock,
            secret=SECRET,
            host=endpoint.address.shm_host,
        ) as node,
        PoolClient(node, registry=CollectorRegistry()) as pool,
    ):
        await until(lambda: pool.ready, "the writer found its store")
        wanted = keys(count, first=1000)
        lease = Lease(RequestId("stopped"), 1, node.ref)
        asked = [PutBlock(key, 16) for key in wanted]
        put = await pool.begin(lease, SPACE.tags, LAYOUT, asked)
        for i, key in enumerate(wanted):
            put.write_part(i, 0, memoryview(part_bytes(key, 0)))
        slots = [answer.slot for answer in put.slots if answer.slot is not None]
        store = node.roster.live(Role.STORE)[0]
        local = pool._link.local  # pyright: ignore[reportPrivateUsage]
        assert local is not None
        assert local.ref == store.ref
        thread = threading.Thread(
            target=scribble, args=(local.arenas[0], slots), daemon=True
        )
        thread.start()
        sys.stdout.write(f"ready {len(slots)}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    server, folder, own_name, blocks = sys.argv[1:]
    asyncio.run(write(server, folder, own_name, int(blocks)))
