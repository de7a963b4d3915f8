"""What was deleted stays away from the SSD tier, whenever that was said."""

from pathlib import Path

import pytest
from tests.unit.ssd_driver import NODE, SsdDriver, key_of, tags_of
from tests.unit.test_ssd_tier import rules

from kvtide.bus.messages import BlocksDone, BlockSelector, RemoveBlocks
from kvtide.kv import BlockKey, Tier
from kvtide.runtime import SystemClock
from kvtide.store.machine import StoreMachine
from kvtide.store.ssd.events import (
    DeletedSpace,
    Found,
    NoteDeleted,
    TierFailed,
    TierOpened,
    WriteRecord,
)
from kvtide.store.ssd.files import FilesSpec, TierFiles
from kvtide.store.ssd.health import TierState

SOON_MS = 60_000


@pytest.fixture
def store(tmp_path: Path) -> SsdDriver:
    """Blocks of two tenants are on the SSD."""
    made = SsdDriver(tmp_path / "ssd", rules())
    for number in range(1, 40):
        made.put([key_of(number)], tenant=number % 2)
        made.quiet()
    assert tenants_on_ssd(made.machine) == {0, 1}
    return made


def tenants_on_ssd(machine: StoreMachine) -> set[int]:
    located = machine.ssd.page(None, 1000)
    return {each.key[-1] % 2 for each in located if each.slot.tier is Tier.SSD}


def tenant_1() -> DeletedSpace:
    until_ms = int(SystemClock().wall() * 1000) + SOON_MS
    return DeletedSpace(tags_of(1).tenant, None, until_ms)


def test_what_is_deleted_while_the_directory_is_read_does_not_come_back(
    store: SsdDriver,
) -> None:
    store.stop()
    found: list[Found] = []
    files = TierFiles(FilesSpec(store.path, NODE, key_id=7), store.arena, SystemClock())
    opened = files.open(found.append)
    assert isinstance(opened, TierOpened)
    machine = StoreMachine(store.store, store.rules)
    machine.ssd.work(store.now_s)
    assert machine.ssd.health.state is TierState.OPENING
    deleted = tenant_1()
    assert machine.ssd.delete(deleted, store.now_s) == []
    for event in found:
        machine.ssd.handle(event, store.now_s)
    # the directory can be written now: later lives must know, too
    assert machine.ssd.handle(opened, store.now_s) == [NoteDeleted(deleted)]
    assert machine.ssd.handle(opened, store.now_s) == []
    assert tenants_on_ssd(machine) == {0}
    files.close()


def test_what_is_deleted_while_the_tier_is_out_does_not_come_back(
    store: SsdDriver,
) -> None:
    store.handle(TierFailed("pulled out"))
    assert store.machine.ssd.health.state is TierState.OUT
    assert store.machine.ssd.delete(tenant_1(), store.now_s) == []
    store.wait(100.0)
    store.settle()
    assert store.machine.ssd.health.state is TierState.READY
    assert tenants_on_ssd(store.machine) == {0}
    for _ in range(2):
        store.stop()
        store.start()
        assert tenants_on_ssd(store.machine) == {0}


@pytest.mark.parametrize(
    "spoilt", [b"[no\n", b"\xff\xfe\n", b"[1]\n", b'["x",null,1]\n']
)
def test_a_damaged_list_of_deletions_keeps_the_tier_out_and_says_so(
    store: SsdDriver, spoilt: bytes
) -> None:
    store.stop()
    (store.path / "deleted").write_bytes(spoilt)
    store.start()
    assert store.machine.ssd.health.state is TierState.OUT
    assert "/deleted says" in store.machine.ssd.health.reason
    (store.path / "deleted").unlink()
    store.wait(100.0)
    assert store.machine.ssd.health.state is TierState.READY


def test_a_file_of_a_foreign_name_is_passed_over(store: SsdDriver) -> None:
    store.stop()
    (store.path / "not-a-number-at.seg").write_bytes(b"?")
    (store.path / "0x0000000000zzzz.seg").write_bytes(b"?")
    store.start()
    assert tenants_on_ssd(store.machine) == {0, 1}


def test_a_directory_that_another_process_holds_is_said_to_be(store: SsdDriver) -> None:
    other = FilesSpec(store.path, NODE, key_id=7)
    files = TierFiles(other, store.arena, SystemClock())
    failed = files.open(lambda _: None)
    assert isinstance(failed, TierFailed)
    assert "another process" in failed.reason
    assert "ssd_dir of its own" in failed.reason


def remove(store: SsdDriver, *keys: BlockKey) -> BlocksDone:
    token = store.ask(RemoveBlocks(select=BlockSelector(keys=keys)))
    done = store.answers.pop(token)
    assert isinstance(done, BlocksDone)
    store.quiet()
    return done


def ssd_keys(store: SsdDriver) -> list[BlockKey]:
    return [each.key for each in store.machine.ssd.page(None, 1000)]


def test_single_blocks_that_are_removed_stay_removed(store: SsdDriver) -> None:
    gone, kept = ssd_keys(store)[:2]
    # a block that is in DRAM now may have been evicted from the SSD before
    assert remove(store, gone, key_of(999)).copies == 1
    for _ in range(2):
        store.stop()
        store.start()
        assert not store.on_ssd(gone)
        assert store.on_ssd(kept)
    # stored again it is a new one
    store.put([gone])
    for number in range(60, 99):
        store.put([key_of(number)])
        store.quiet()
    assert store.on_ssd(gone)
    store.stop()
    store.start()
    assert store.on_ssd(gone)


def test_a_block_that_is_removed_on_its_way_to_the_ssd_does_not_arrive(
    store: SsdDriver,
) -> None:
    number = 100
    while not any(isinstance(each, WriteRecord) for each in store.pending):
        store.put([key_of(number)])
        store.wait(0.05)
        number += 1
    write = next(each for each in store.pending if isinstance(each, WriteRecord))
    remove(store, write.wanted.key)
    assert not store.on_ssd(write.wanted.key)
    store.stop()
    store.start()
    assert not store.on_ssd(write.wanted.key)


def test_blocks_that_are_removed_while_the_tier_is_out_do_not_come_back(
    store: SsdDriver,
) -> None:
    gone = ssd_keys(store)[0]
    store.handle(TierFailed("pulled out"))
    remove(store, gone)
    store.wait(100.0)
    store.settle()
    assert ssd_keys(store)
    for _ in range(2):
        assert not store.on_ssd(gone)
        store.stop()
        store.start()


def test_a_damaged_list_of_removed_blocks_keeps_the_tier_out(store: SsdDriver) -> None:
    store.stop()
    (store.path / "removed").write_bytes(b"[1]\n")
    store.start()
    assert store.machine.ssd.health.state is TierState.OUT
    assert "/removed says" in store.machine.ssd.health.reason
