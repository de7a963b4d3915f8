"""What a store tells of its blocks, and how sizes share its arena."""

from dataclasses import replace

import msgspec
import pytest
from tests.unit.store_driver import CONDUCTOR, STORE, StoreDriver, lease_of, tags

from kvtide.bus.messages import Presence, PresenceReply, PutGranted, PutSlot
from kvtide.kv import BlockKey
from kvtide.store.machine import StoreRules

KEYS = [BlockKey(bytes([number]) * 16) for number in range(1, 30)]
A, B, C, D = KEYS[:4]
RULES = StoreRules(arena_bytes=4096, slab_bytes=4096)


@pytest.fixture
def store() -> StoreDriver:
    """Room for four blocks of the usual size."""
    return StoreDriver(RULES)


# ---- telling


def test_changes_are_gathered_and_drops_come_first(store: StoreDriver) -> None:
    store.store(A, B, C, D)
    assert store.gossip_seq == 1
    granted = store.grant(lease_of(), [KEYS[9]])
    store.commit_all(lease_of(), granted)
    assert store.gossip_seq == 1
    store.wait(RULES.gossip_delay_s)
    assert store.gossip_seq == 2
    assert set(store.truth) == {A, B, C, KEYS[9]}


def test_what_came_and_went_between_two_batches_is_never_told(
    store: StoreDriver,
) -> None:
    for key in KEYS[:8]:
        granted = store.grant(lease_of(), [key])
        store.commit_all(lease_of(), granted)
        store.release(lease_of())
    store.wait(0.05)
    assert store.gossip_seq == 1
    assert set(store.truth) == set(KEYS[4:8])
    assert store.rows.keys() == store.truth.keys()


def test_a_snapshot_comes_in_pages_by_key() -> None:
    store = StoreDriver(StoreRules(arena_bytes=1 << 16, slab_bytes=4096, page_limit=4))
    store.store(*reversed(KEYS[:10]))
    pages = store.pages()
    assert [len(page.located) for page in pages] == [4, 4, 2]
    assert [each.key for page in pages for each in page.located] == KEYS[:10]
    assert {(page.store, page.seq) for page in pages} == {(STORE, 1)}


def test_presence_answers_with_the_prefix(store: StoreDriver) -> None:
    store.store(A, B, D)
    answer = store.answer(Presence(keys=(A, B, C, D)), CONDUCTOR)
    assert answer == PresenceReply(located=(store.truth[A], store.truth[B]))


# ---- several sizes


def test_another_size_takes_slabs_of_what_is_older() -> None:
    store = StoreDriver(StoreRules(arena_bytes=16 << 10, slab_bytes=4096))
    for key in KEYS[:16]:
        store.store(key, size=1000)
    big = KEYS[16:19]
    for key in big:
        store.store(key, size=4000)
    assert set(big) <= set(store.truth)
    assert set(KEYS[12:16]) & set(store.truth)
    # and back again
    for key in KEYS[19:29]:
        store.store(key, size=1000)
    assert set(KEYS[19:29]) <= set(store.truth)


def test_neighbouring_slabs_make_room_for_a_larger_block() -> None:
    store = StoreDriver(StoreRules(arena_bytes=16 << 10, slab_bytes=4096))
    for key in KEYS[:16]:
        store.store(key, size=1000)
    store.store(KEYS[20], size=10_000)
    assert KEYS[20] in store.truth
    assert tags(1000) != tags(10_000)


def test_pinned_slabs_are_not_taken() -> None:
    store = StoreDriver(StoreRules(arena_bytes=8 << 10, slab_bytes=4096))
    for key in KEYS[:8]:
        store.store(key, size=1000)
    store.grant(lease_of(), [KEYS[0], KEYS[7]], size=1000)
    refused = store.grant(lease_of("big"), [None], size=8000)
    assert refused.slots == (PutSlot(None),)
    assert len(store.truth) == 8


def test_a_space_is_kept_for_as_long_as_it_has_a_slot(store: StoreDriver) -> None:
    """Clients choose salts, so there is no end of spaces."""
    spaces = store.machine.inventory.spaces
    for number in range(5000):
        lease = lease_of(f"r{number}")
        begin = store.put_begin(lease, [None, BlockKey(number.to_bytes(16, "big"))])
        tenant = number.to_bytes(16, "big")
        own = msgspec.structs.replace(begin, tags=replace(begin.tags, tenant=tenant))
        assert isinstance(store.answer(own), PutGranted)
        assert len(spaces) == 1
        store.release(lease)
        assert len(spaces) == 0


def test_blocks_of_many_spaces_leave_none_behind(store: StoreDriver) -> None:
    for number in range(1, 30):
        lease = lease_of(f"r{number}")
        granted = store.grant(lease, [KEYS[number - 1]], size=1000 - number)
        store.commit_all(lease, granted)
        store.release(lease)
    table = store.machine.inventory.table
    assert len(store.machine.inventory.spaces) == table.counts().used


def test_where_memory_is_refused_blocks_share_what_there_is() -> None:
    left = [True]
    rules = StoreRules(arena_bytes=1 << 15, slab_bytes=4096)
    store = StoreDriver(rules, lambda _offset, _length: left[0])
    store.store(A, B)
    left[0] = False
    store.store(*KEYS[2:12])
    assert len(store.truth) == 4
    # another size finds its room in what the first one had
    store.store(KEYS[20], size=3000)
    assert KEYS[20] in store.truth
    left[0] = True
    store.wait(rules.silence_s)
    store.store(*KEYS[2:12])
    assert store.truth.keys() >= {*KEYS[2:12], KEYS[20]}
