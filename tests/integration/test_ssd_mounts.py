"""The tier on file systems that are full, read-only or broken: real mounts, as root.

Serving goes on, the tier says what is wrong, and is back when the trouble is over.
"""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.integration.nats_server import nats_server
from tests.integration.pool_world import (
    LAYOUT,
    Memory,
    Worker,
    World,
    keys,
    until,
    world,
)

from kvtide.bus.messages import BlockState, StoreLoad
from kvtide.kv import BlockKey, Located, Tier
from kvtide.store.shell import StoreService

DRAM = 16 * LAYOUT.slot_bytes
FAILING_FS = Path(__file__).with_name("failing_fs.py")

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None,
    reason="mounting needs root and mount",
)


def run(*command: str) -> None:
    done = subprocess.run(  # noqa: S603 - the test's own words
        command, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def mounted(path: Path, *options: str) -> Generator[Path]:
    path.mkdir()
    run("mount", *options, str(path))
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)  # noqa: S603, S607


@contextmanager
def failing_mount(path: Path, folder: Path) -> Generator[Path]:
    """``folder`` mounted at ``path`` through ``failing_fs.py``."""
    if not Path("/dev/fuse").exists():
        pytest.skip("there is no /dev/fuse")
    path.mkdir()
    folder.mkdir()
    command = [sys.executable, str(FAILING_FS), str(path), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: S603
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            pytest.skip("this system does not let us mount with FUSE")
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)  # noqa: S603, S607
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture
async def here(tmp_path: Path) -> AsyncGenerator[World]:
    with nats_server() as server:
        async with world(tmp_path, server.url) as made:
            yield made


async def store_on(
    here: World, folder: Path, *, capacity: int = 8 << 20
) -> StoreService:
    return await here.store(
        state_dir=here.folder / "state",
        ssd_dir=folder / "ssd",
        dram_bytes=DRAM,
        slab_bytes=DRAM,
        ssd_bytes=capacity,
        ssd_segment_bytes=1 << 17,
        ssd_write_bytes_per_s=1e9,
        dram_high=0.6,
        dram_low=0.5,
    )


def load(store: StoreService) -> StoreLoad:
    assert store.machine is not None
    return store.machine.load()


async def state(store: StoreService, *wanted: str) -> None:
    await until(lambda: load(store).ssd_state in wanted, f"the tier is {wanted}")


async def fill(worker: Worker, first: int, count: int) -> tuple[BlockKey, ...]:
    """Blocks, a few at a time; every one is stored, whatever the SSD does."""
    chain = keys(count, first)
    for start in range(0, count, 4):
        part = chain[start : start + 4]
        states = await worker.store_blocks(part, f"fill-{first}-{start}")
        assert set(states) == {BlockState.STORED}
        await asyncio.sleep(0.01)
    return chain


def on_ssd(worker: Worker) -> list[Located]:
    known = worker.index.located.values()
    return [each for each in known if each.slot.tier is Tier.SSD]


async def reads_well(worker: Worker, located: list[Located]) -> int:
    """How many were had; what was had is right."""
    memory = Memory()
    outcomes = await worker.read(located, memory)
    for i, (each, outcome) in enumerate(zip(located, outcomes, strict=True)):
        assert not outcome.ok or memory.holds(i, each.key)
    return sum(outcome.ok for outcome in outcomes)


async def test_a_full_disk_takes_no_more_and_serves_on(
    here: World, tmp_path: Path
) -> None:
    options = ("-t", "tmpfs", "-o", "size=1m", "tmpfs")
    with mounted(tmp_path / "small", *options) as small:
        store = await store_on(here, small)
        worker = await here.linked_worker()
        await state(store, "ready")
        # another takes the room that the tier counted on
        (small / "other").write_bytes(bytes(700 << 10))
        await fill(worker, 0, 120)
        await until(lambda: load(store).ssd_state == "read_only", "the disk is full")
        assert "space" in load(store).ssd_reason
        await until(lambda: len(on_ssd(worker)) > 4, "blocks are on the SSD")
        assert await reads_well(worker, on_ssd(worker)[:4]) == 4
        (small / "other").unlink()
        await state(store, "ready")
        fresh = await fill(worker, 10_000, 40)
        await until(
            lambda: any(each.key in fresh for each in on_ssd(worker)),
            "it is written again",
        )
        await store.close()


async def test_a_file_system_that_turns_read_only_is_read_on(
    here: World, tmp_path: Path
) -> None:
    options = ("-t", "tmpfs", "-o", "size=16m", "tmpfs")
    with mounted(tmp_path / "turns", *options) as turns:
        store = await store_on(here, turns)
        worker = await here.linked_worker()
        await state(store, "ready")
        await fill(worker, 0, 40)
        await until(lambda: len(on_ssd(worker)) > 8, "blocks are on the SSD")
        run("mount", "-o", "remount,ro", str(turns))
        await fill(worker, 10_000, 40)
        await state(store, "read_only")
        assert "ead-only" in load(store).ssd_reason
        assert await reads_well(worker, on_ssd(worker)[:4]) == 4
        run("mount", "-o", "remount,rw", str(turns))
        await state(store, "ready")
        await store.close()


async def test_what_a_broken_disk_had_is_announced_no_more(
    here: World, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    with failing_mount(tmp_path / "broken", disk) as broken:
        store = await store_on(here, broken)
        worker = await here.linked_worker()
        await state(store, "ready")
        await fill(worker, 0, 40)
        await until(lambda: len(on_ssd(worker)) > 8, "blocks are on the SSD")
        there = on_ssd(worker)
        (disk / ".fail").write_text("read write")
        assert await reads_well(worker, there[:4]) == 0
        await state(store, "out", "opening")
        await until(lambda: not on_ssd(worker), "nobody believes in them any more")
        fresh = await fill(worker, 10_000, 8)
        assert await reads_well(worker, await worker.located(fresh[-2:])) == 2
        (disk / ".fail").unlink()
        await state(store, "ready")
        await until(lambda: len(on_ssd(worker)) >= len(there) // 2, "they are back")
        assert await reads_well(worker, on_ssd(worker)[:4]) == 4
        await store.close()


async def test_a_disk_that_fails_writes_alone_is_read_on(
    here: World, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    with failing_mount(tmp_path / "broken", disk) as broken:
        store = await store_on(here, broken)
        worker = await here.linked_worker()
        await state(store, "ready")
        await fill(worker, 0, 40)
        await until(lambda: len(on_ssd(worker)) > 8, "blocks are on the SSD")
        (disk / ".fail").write_text("write")
        await fill(worker, 10_000, 40)
        await state(store, "read_only")
        assert await reads_well(worker, on_ssd(worker)[:4]) == 4
        (disk / ".fail").unlink()
        await state(store, "ready")
        await store.close()


async def test_a_small_ext4_is_used_with_direct_io(here: World, tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(24 << 20)
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no mkfs.ext4")
    run("mkfs.ext4", "-q", str(image))
    with mounted(tmp_path / "ext4", "-o", "loop", str(image)) as ext4:
        store = await store_on(here, ext4)
        worker = await here.linked_worker()
        await state(store, "ready")
        await fill(worker, 0, 80)
        await until(lambda: len(on_ssd(worker)) > 20, "blocks are on the SSD")
        assert await reads_well(worker, on_ssd(worker)[:12]) == 12
        assert load(store).ssd_state == "ready"
        await store.close()
