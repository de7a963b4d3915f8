"""How large an arena is, who may have it, and what a store shows of itself."""

import os
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvtide.bus.messages import StoreLoad
from kvtide.runtime import ConfigError, SystemClock
from kvtide.store.arena import (
    DEFAULT_LIMIT_BYTES,
    Arena,
    arena_bytes,
    free_bytes,
    note_huge_pages,
)
from kvtide.store.metrics import StoreMetrics
from kvtide.store.slots import SlotTable
from kvtide.store.tally import Tally
from kvtide.transfer import Endpoint, huge_pages


def test_the_size_is_what_was_set_in_whole_pages(tmp_path: Path) -> None:
    assert arena_bytes(10_000, tmp_path) == 8192


def test_the_default_is_a_quarter_of_what_is_free_within_a_limit(
    tmp_path: Path,
) -> None:
    quarter = free_bytes(tmp_path) // 4
    size = arena_bytes(0, tmp_path)
    assert 0 < size <= DEFAULT_LIMIT_BYTES
    assert size == DEFAULT_LIMIT_BYTES or size <= quarter * 2


@pytest.mark.parametrize(
    ("wanted", "folder", "key"),
    [
        (1 << 60, "", "dram_bytes"),
        (100, "", "dram_bytes"),
        (0, "missing", "shm_dir"),
        (0, None, "shm_dir"),
    ],
)
def test_what_can_not_be_had_names_its_setting(
    tmp_path: Path, wanted: int, folder: str | None, key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        arena_bytes(wanted, None if folder is None else tmp_path / folder)
    assert caught.value.key == key


def test_metrics_show_the_account_and_the_tally() -> None:
    registry = CollectorRegistry()
    metrics = StoreMetrics(registry)
    assert registry.get_sample_value("kvtide_store_blocks") is None
    tally = Tally(evicted=3)
    load = StoreLoad(
        total_slots=10,
        free_slots=1,
        used_slots=2,
        reserved_slots=3,
        quarantined_slots=4,
        seq=9,
    )
    metrics.update(load, 2, tally)
    states = ("free", "used", "reserved", "quarantined")
    assert [
        registry.get_sample_value("kvtide_store_slots", {"state": state})
        for state in states
    ] == [1, 2, 3, 4]
    assert registry.get_sample_value("kvtide_store_gossip_seq") == 9
    tally.evicted += 1
    assert registry.get_sample_value("kvtide_store_evicted_total") == 4
    for name in Tally.names():
        assert registry.get_sample_value(f"kvtide_store_{name}_total") is not None


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Generator[Path]:
    """Shared memory of 4 MiB."""
    yield from _tmpfs(tmp_path / "shm", "size=4m")


@pytest.fixture
def huge_tmpfs(tmp_path: Path) -> Generator[Path]:
    """Shared memory of 16 MiB that has huge pages for who asks."""
    yield from _tmpfs(tmp_path / "huge", "size=16m,huge=advise")


def _tmpfs(folder: Path, options: str) -> Generator[Path]:
    folder.mkdir()
    mount = ["/bin/mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() != 0 or _status(*mount) != 0:
        pytest.skip("only root may mount, and not everywhere")
    yield folder
    assert _status("/bin/umount", "-l", str(folder)) == 0


def _status(*command: str) -> int:
    if not Path(command[0]).exists():
        return 127
    done = subprocess.run(command, check=False, capture_output=True)  # noqa: S603 - ours
    return done.returncode


async def test_where_others_filled_the_shared_memory_there_is_no_room(
    small_tmpfs: Path,
) -> None:
    """Without this a writer is killed when it touches what it was given."""
    async with Endpoint(
        node="store",
        epoch=1,
        secret=b"s" * 32,
        clock=SystemClock(),
        shm_dir=small_tmpfs,
    ) as endpoint:
        arena = Arena(endpoint, 3 << 20)
        table = SlotTable(3 << 20, slab_bytes=1 << 20, back=arena.back)
        (small_tmpfs / "of others").write_bytes(bytes(2 << 20))

        def fill() -> int:
            taken = 0
            while (slot := table.take(256 << 10, space=0, tokens=1)) is not None:
                offset = table.offset(slot)
                arena.view[offset : offset + (256 << 10)] = b"x" * (256 << 10)
                taken += 1
            return taken

        assert 4 <= fill() <= 8
        assert table.counts().total < 12
        (small_tmpfs / "of others").unlink()
        assert fill() == 0
        table.back_again()
        assert fill() > 0
        assert table.counts().total == 12
        await arena.close()


async def test_huge_pages_are_taken_where_the_mount_leaves_it_to_us(
    huge_tmpfs: Path, small_tmpfs: Path
) -> None:
    assert huge_pages(small_tmpfs) == "never"
    assert huge_pages(huge_tmpfs) == "advise"
    async with Endpoint(
        node="store",
        epoch=1,
        secret=b"s" * 32,
        clock=SystemClock(),
        shm_dir=huge_tmpfs,
    ) as endpoint:
        arena = Arena(endpoint, 12 << 20)
        path = huge_tmpfs / arena.readable().shm_name
        assert path.stat().st_blocks == 0
        assert arena.back(4096, 5 << 20)
        assert path.stat().st_blocks * 512 >= 5 << 20
        assert arena.view[4096] == 0
        (huge_tmpfs / "of others").write_bytes(bytes(8 << 20))
        assert not arena.back(6 << 20, 6 << 20)
        arena.give_back(0, 12 << 20)
        assert path.stat().st_blocks * 512 < 2 << 20
        note_huge_pages(huge_tmpfs)
        note_huge_pages(small_tmpfs)
        await arena.close()
