"""A conductor that is killed and started again soon knows all blocks exactly.

How soon is measured by ``ops/bench/conductor_processes.py``; the limit here is ten times
what is promised, for a machine that does other things too.
"""

import asyncio
import signal
from pathlib import Path

import pytest
from tests.integration.conductor_site import settled, two_and_a_store
from tests.integration.conductor_stand_ins import (
    until,
)
from tests.unit.conductor_cluster import keys

BLOCKS = 100_000
PROMISED_S = 5.0


@pytest.mark.full
@pytest.mark.timeout(400)
async def test_a_restarted_conductor_is_exact_again_at_100_000_blocks(
    tmp_path: Path,
) -> None:
    async with two_and_a_store(tmp_path) as (cluster, store):
        await store.add(keys(BLOCKS), said=False)
        for name in ("c1", "c2"):
            await cluster.until(name, lambda s: s.exact and knows_all(s.indexed_copies))
        epoch = cluster.epoch("c1")
        await cluster.end("c1", signal.SIGKILL)
        async with asyncio.timeout(10 * PROMISED_S):
            await cluster.start("c1")
            await until(lambda: cluster.is_live("c1") and cluster.epoch("c1") > epoch)
            await cluster.until(
                "c1",
                lambda s: s.exact and knows_all(s.indexed_copies) and settled(s, 8),
            )


def knows_all(copies: int) -> bool:
    return copies == BLOCKS
