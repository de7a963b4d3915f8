"""A tenant is deleted, and a store that runs on is not told of it: its link is silent."""

import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from tests.integration.nats_server import nats_server
from tests.integration.pool_world import SECRET, SPACE, World, keys, until, world
from tests.integration.test_ssd_crashes import SETTINGS
from tests.integration.test_store_processes import load, store_process

from kvtide.catalog import Catalog, DeletionRow, Limits, Tenancy
from kvtide.kv import tenant_tag
from kvtide.runtime import SystemClock

TENANT = SPACE.space.tenant
TAG = tenant_tag(SECRET, TENANT)


@pytest.fixture
async def here(tmp_path: Path) -> AsyncGenerator[World]:
    with nats_server() as server:
        async with world(tmp_path, server.url) as made:
            yield made


def catalog_of(here: World) -> str:
    return f"sqlite+aiosqlite:///{here.folder}/state/catalog.sqlite3"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("sealed", [False, True])
async def test_a_store_that_nobody_told_finds_it_in_the_catalog(
    here: World, sealed: bool
) -> None:
    settings: dict[str, object] = {**SETTINGS, "deletions_check_s": 0.2}
    if sealed:
        key = here.folder / "ssd.key"
        key.write_text(os.urandom(32).hex())
        settings["ssd_key_file"] = str(key)
    worker = await here.worker()
    chain = keys(8)
    async with store_process(here, **settings) as store:
        await until(lambda: worker.pool.ready, "the worker found its store")
        await worker.store_blocks(chain)
        await until(lambda: load(worker).ssd_blocks == len(chain), "all are saved")
        epoch = worker.node.roster.live()[0].ref
        async with Catalog.open(catalog_of(here)) as catalog:
            # another tenant's end is none of this one's
            await catalog.write([DeletionRow(b"o" * 16, b"", SystemClock().wall())])
            await SystemClock().sleep(1.0)
            assert load(worker).ssd_blocks == len(chain)
            tenancy = Tenancy(catalog, SystemClock(), "test:me")
            await tenancy.add_tenant(str(TENANT), title="", share="", limits=Limits())
            # only the catalog knows: no store is told
            await tenancy.delete_tenant(str(TENANT), TAG)
        await until(lambda: load(worker).ssd_blocks == 0, "none is on the SSD")
        await until(lambda: load(worker).used_slots == 0, "none is in DRAM")
        assert worker.node.roster.live()[0].ref == epoch  # the same life
        assert await store.end(signal.SIGTERM) == 0
