"""A real store with encrypted blocks: down while its tenant is deleted, and started again."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path

import pytest
from tests.integration.nats_server import nats_server
from tests.integration.pool_world import (
    CLUSTER,
    SPACE,
    World,
    keys,
    part_bytes,
    until,
    world,
)
from tests.integration.test_ssd_crashes import SETTINGS
from tests.integration.test_store_processes import (
    STORE_PROGRAM,
    load,
    process_settings,
    program,
)

from kvtide.catalog import Catalog, Limits, Tenancy
from kvtide.kv import BlockKey, Located, Tier
from kvtide.runtime import SystemClock

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]


@pytest.fixture
async def here(tmp_path: Path) -> AsyncGenerator[World]:
    with nats_server() as server:
        async with world(tmp_path, server.url) as made:
            yield made


def sealed_settings(here: World) -> dict[str, object]:
    key = here.folder / "ssd.key"
    if not key.exists():
        key.write_text(os.urandom(32).hex())
    return process_settings(here, **SETTINGS, ssd_key_file=str(key))


async def kvtide(here: World, *words: str, limit_s: float = 60.0) -> int:
    """A command as an operator types it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvtide.cli", *words),
        *("--nats", here.nats, "--cluster", CLUSTER),
        *("--state-dir", str(here.folder / "state")),
        env={**os.environ, "KVTIDE_SECRET_FILE": str(here.folder / "secret")},  # noqa: TID251
    )
    async with asyncio.timeout(limit_s):
        return await process.wait()


def disk(here: World) -> bytes:
    folder = here.folder / "state" / "ssd" / "store"
    return b"".join(path.read_bytes() for path in folder.glob("*.seg"))


def nothing_of(chain: tuple[BlockKey, ...], here: World) -> bool:
    raw = disk(here)
    return not any(part_bytes(key, 0) in raw for key in chain)


async def test_down_while_its_tenant_is_deleted_it_has_nothing_to_serve(
    here: World,
) -> None:
    worker = await here.worker()
    chain = keys(8)
    settings = json.dumps(sealed_settings(here))
    async with program(STORE_PROGRAM, "store", settings) as store:
        await until(lambda: worker.pool.ready, "the worker found its store")
        await worker.store_blocks(chain)
        await until(lambda: load(worker).ssd_blocks == len(chain), "all are saved")
        assert await store.end(signal.SIGTERM) == 0
    assert disk(here).count(b"KVTR") >= len(chain)
    assert nothing_of(chain, here)

    async with program(STORE_PROGRAM, "store", settings) as store:
        await until(
            lambda: on_ssd(worker.index.located.values()) == len(chain), "they are back"
        )
        await store.end(signal.SIGKILL)

    url = f"sqlite+aiosqlite:///{here.folder}/state/catalog.sqlite3"
    name = str(SPACE.space.tenant)
    async with Catalog.open(url) as catalog:
        tenancy = Tenancy(catalog, SystemClock(), "test:me")
        await tenancy.add_tenant(name, title="", share="", limits=Limits())
    # no store is there to be told
    assert await kvtide(here, "tenants", "delete", name, "--yes") == 0

    before = disk(here)
    async with program(STORE_PROGRAM, "store", settings) as store:
        await until(lambda: load(worker).ssd_state == "ready", "the disk is open")
        assert load(worker).ssd_blocks == 0
        assert on_ssd(worker.index.located.values()) == 0
        assert await store.end(signal.SIGTERM) == 0
    assert before.count(b"KVTR") >= len(chain)


def on_ssd(located: Iterable[Located]) -> int:
    return sum(each.slot.tier is Tier.SSD for each in located)


async def test_another_key_is_one_clear_line(
    here: World, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = await here.worker()
    settings = sealed_settings(here)
    async with program(STORE_PROGRAM, "store", json.dumps(settings)) as store:
        await until(lambda: worker.pool.ready, "the worker found its store")
        await until(lambda: load(worker).ssd_state == "ready", "the disk is open")
        assert await store.end(signal.SIGTERM) == 0
    (here.folder / "ssd.key").write_text(os.urandom(32).hex())
    flags = [
        f"--{key.replace('_', '-')}={value}"
        for key, value in settings.items()
        if key not in ("nats", "cluster", "state_dir")
    ]
    assert await kvtide(here, "store", *flags) == 2
    assert "another key" in capfd.readouterr().err
