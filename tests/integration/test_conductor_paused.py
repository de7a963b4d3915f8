"""A conductor that stands still while a million changes of the index go by (F8).

What it misses it is not kept for: its memory stays bounded, it sees the gap, pulls the
store's blocks anew, and knows them exactly.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.integration.conductor_site import Conductors, settled, two_and_a_store
from tests.integration.conductor_stand_ins import (
    PretendedStore,
)
from tests.integration.halting import halt
from tests.unit.conductor_cluster import keys

from kvtide.bus import BusError
from kvtide.bus.messages import StatusReply

EVENTS = 1_000_000
CHUNK = 100
KEPT = 20_000
GROWN_BYTES = 96 << 20
"""All that is said while it stands still is twice as much on the wire alone."""


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_a_conductor_that_missed_a_million_changes_is_exact_again(
    tmp_path: Path,
) -> None:
    async with two_and_a_store(tmp_path) as (cluster, store):
        await store.add(keys(CHUNK))
        await knows_it(cluster, store)
        pulls, paused = store.pulls, cluster.processes["c1"].pid
        before = resident(paused)
        halt(paused)
        try:
            await churn(store)
        finally:
            os.kill(paused, signal.SIGCONT)
        await knows_it(cluster, store)
        assert store.pulls > pulls
        assert resident(paused) - before < GROWN_BYTES


async def churn(store: PretendedStore) -> None:
    """Say a million changes: as many blocks come as go, once there are enough."""
    made = keys(EVENTS // 2 + KEPT)
    said = 0
    for at in range(0, len(made), CHUNK):
        await store.add(made[at : at + CHUNK])
        said += CHUNK
        if at >= KEPT:
            await store.drop(made[at - KEPT : at - KEPT + CHUNK])
            said += CHUNK
        # our own beats must go out, or nobody would believe us
        await asyncio.sleep(0)
    assert said >= EVENTS


async def knows_it(cluster: Conductors, store: PretendedStore) -> None:
    def exact(status: StatusReply) -> bool:
        return (
            status.exact
            and status.indexed_copies == len(store.copies)
            and settled(status, 8)
        )

    async with asyncio.timeout(120):
        for name in ("c1", "c2"):
            while not await says(cluster, name, exact):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)


async def says(
    cluster: Conductors, name: str, what: Callable[[StatusReply], bool]
) -> bool:
    try:
        return what(await cluster.status(name))
    except BusError:  # one that finds out that it stood still answers nobody
        return False


def resident(pid: int) -> int:
    return psutil.Process(pid).memory_info().rss
