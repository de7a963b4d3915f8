"""The store's machine, one rule at a time."""

import pytest
from tests.unit.store_driver import CONDUCTOR, WRITER, StoreDriver, lease_of

from kvtide.bus.messages import (
    Ack,
    BadCopy,
    BlockState,
    Failure,
    Owned,
    PlacementMade,
    PutCommit,
    PutCommitted,
    PutGranted,
    PutSlot,
)
from kvtide.bus.messages.pool import CommitBlock
from kvtide.kv import BlockKey, NodeId, NodeRef, RequestId, RequestRef
from kvtide.store.events import ConnectionGone, Deaf, OwnerGone, OwnerUp, Received
from kvtide.store.machine import StoreRules

KEYS = [BlockKey(bytes([number]) * 16) for number in range(1, 30)]
A, B, C, D, E = KEYS[:5]
RULES = StoreRules(arena_bytes=4096, slab_bytes=4096)
AGAIN = NodeRef(WRITER.node, WRITER.epoch + 1)


@pytest.fixture
def store() -> StoreDriver:
    """Room for four blocks of the usual size."""
    return StoreDriver(RULES)


def place(store: StoreDriver, *keys: BlockKey, hold_ms: float = 0) -> None:
    placement = PlacementMade(
        conductor=CONDUCTOR,
        request=RequestId("p"),
        attempt=1,
        gateway=CONDUCTOR,
        model="m",
        prefill=None,
        decode=NodeId("d"),
        new_tokens=1,
        prompt_tokens=1,
        max_new_tokens=1,
        prefill_ms=1,
        keys=keys,
        hold_ms=hold_ms,
    )
    assert store.handle(Received(placement, CONDUCTOR)) == []


def owned(store: StoreDriver, seq: int, *requests: str) -> None:
    refs = tuple(RequestRef(RequestId(request), 1) for request in requests)
    answer = store.answer(Owned(owner=WRITER, seq=seq, requests=refs))
    assert isinstance(answer, Ack)


def states(store: StoreDriver) -> tuple[int, int, int, int]:
    load = store.machine.load()
    return (
        load.free_slots,
        load.used_slots,
        load.reserved_slots,
        load.quarantined_slots,
    )


# ---- recency


def test_the_longest_unused_goes_first(store: StoreDriver) -> None:
    for key in (A, B, C, D):
        store.store(key)
    store.store(E)
    assert set(store.truth) == {B, C, D, E}


def test_the_tail_of_a_put_goes_before_its_head(store: StoreDriver) -> None:
    store.store(A, B, C, D)
    store.store(E)
    assert set(store.truth) == {A, B, C, E}


def test_a_placement_makes_blocks_recent_and_keeps_the_head_longest(
    store: StoreDriver,
) -> None:
    for key in (A, B, C, D):
        store.store(key)
    place(store, A, B)
    store.store(*KEYS[10:12])
    assert set(store.truth) == {A, B, *KEYS[10:12]}
    store.store(KEYS[12])
    assert set(store.truth) == {A, *KEYS[10:13]}


def test_a_held_block_stays_until_its_time(store: StoreDriver) -> None:
    for key in (A, B, C, D):
        store.store(key)
    place(store, A, B, C, hold_ms=2000)
    store.store(*KEYS[10:13])
    assert {A, B, C} < set(store.truth)
    assert store.machine.tally.no_room == 2
    store.wait(3)
    store.store(*KEYS[13:16])
    assert set(store.truth) == {A, *KEYS[13:16]}


def test_a_hold_is_bounded(store: StoreDriver) -> None:
    store.store(A, B, C, D)
    place(store, A, B, C, D, hold_ms=1e12)
    store.wait(RULES.hold_limit_s + 1)
    store.store(E)
    assert E in store.truth


def test_free_slots_are_reused_oldest_first(store: StoreDriver) -> None:
    first = store.grant(lease_of("1"), [None, None, None])
    offsets = [each.slot.offset for each in first.slots if each.slot]
    store.release(lease_of("1"))
    second = store.grant(lease_of("2"), [None, None, None])
    fresh = [each.slot.offset for each in second.slots if each.slot]
    # one slot was never used: it is the longest unused of all
    assert fresh[0] not in offsets
    assert set(fresh[1:]) < set(offsets)


# ---- puts


def test_a_repeated_begin_gets_the_same_slots(store: StoreDriver) -> None:
    message = store.put_begin(lease_of(), [A, None])
    assert store.answer(message) == store.answer(message)
    assert states(store) == (2, 0, 2, 0)


def test_a_repeated_commit_gets_the_same_states(store: StoreDriver) -> None:
    granted = store.grant(lease_of(), [A, None])
    assert store.commit_all(lease_of(), granted) == (BlockState.STORED,) * 2
    assert store.commit_all(lease_of(), granted) == (BlockState.STORED,) * 2
    assert store.machine.tally.stored == 2
    store.wait(0.05)
    assert list(store.truth) == [A]


def test_commits_while_one_is_verified_all_get_its_answer(store: StoreDriver) -> None:
    granted = store.grant(lease_of(), [A])
    slot = granted.slots[0].slot
    assert slot is not None
    commit = PutCommit(lease=lease_of(), blocks=(CommitBlock(slot, 9),))
    assert store.ask(commit, WRITER) == []
    assert store.ask(commit, WRITER) == []
    assert len(store.verifies) == 1
    answers = [reply.message for reply in store.settle()]
    assert answers == [PutCommitted(states=(BlockState.STORED,))] * 2


def test_what_two_put_at_once_is_stored_once(store: StoreDriver) -> None:
    one, two = lease_of("1"), lease_of("2")
    first, second = store.grant(one, [A]), store.grant(two, [A])
    assert store.commit_all(two, second) == (BlockState.STORED,)
    assert store.commit_all(one, first) == (BlockState.DUPLICATE,)
    assert store.commit_all(one, first) == (BlockState.DUPLICATE,)
    assert states(store) == (2, 2, 0, 0)
    store.release(one)
    assert states(store) == (3, 1, 0, 0)
    store.release(two)
    store.wait(0.05)
    assert store.truth[A].slot == second.slots[0].slot


def test_the_first_writer_may_die_and_the_second_stores(store: StoreDriver) -> None:
    one, two = lease_of("1"), lease_of("2")
    store.grant(one, [A])
    second = store.grant(two, [A])
    store.release(one)
    assert store.commit_all(two, second) == (BlockState.STORED,)


def test_an_existing_copy_is_pinned_for_the_lease(store: StoreDriver) -> None:
    store.store(A)
    granted = store.grant(lease_of(), [A, B, C, D, E])
    located = granted.slots[0].existing
    assert located == store.truth[A]
    # the last one finds no room, for what is here is pinned or being written
    assert granted.slots[4] == PutSlot(None)
    assert A in store.truth
    store.release(lease_of())
    assert store.machine.load().pins == 0


def test_a_block_of_another_size_is_no_existing_copy() -> None:
    store = StoreDriver(StoreRules(arena_bytes=8192, slab_bytes=4096))
    store.store(A, size=1000)
    granted = store.grant(lease_of(), [A], size=500)
    assert granted.slots[0].existing is None
    assert store.commit_all(lease_of(), granted) == (BlockState.DUPLICATE,)


def test_bytes_that_differ_are_not_stored(store: StoreDriver) -> None:
    granted = store.grant(lease_of(), [A])
    assert store.commit_all(lease_of(), granted, good=False) == (BlockState.CORRUPT,)
    assert states(store) == (3, 0, 1, 0)
    # the writer may mend it
    assert store.commit_all(lease_of(), granted) == (BlockState.STORED,)


def test_a_commit_after_the_release_is_stale(store: StoreDriver) -> None:
    granted = store.grant(lease_of(), [A])
    slot = granted.slots[0].slot
    assert slot is not None
    commit = PutCommit(lease=lease_of(), blocks=(CommitBlock(slot, 9),))
    store.ask(commit, WRITER)
    store.release(lease_of())
    (reply,) = store.settle()
    assert reply.message == PutCommitted(states=(BlockState.STALE,))
    assert store.answer(commit) == PutCommitted(states=(BlockState.STALE,))
    assert states(store) == (4, 0, 0, 0)


@pytest.mark.parametrize(
    ("size", "header", "code"),
    [(4097, 192, "bad_size"), (1000, 1000, "bad_size"), (1000, 0, "bad_size")],
)
def test_sizes_that_can_not_be_are_refused(
    store: StoreDriver, size: int, header: int, code: str
) -> None:
    message = store.put_begin(lease_of(), [A])
    changed = type(message)(
        lease=message.lease,
        put=message.put,
        tags=message.tags,
        slot_bytes=size,
        header_bytes=header,
        blocks=message.blocks,
    )
    answer = store.answer(changed)
    assert isinstance(answer, Failure)
    assert answer.code == code
    assert states(store) == (0, 0, 0, 0)


# ---- leases


def test_two_lists_without_it_end_a_lease(store: StoreDriver) -> None:
    store.grant(lease_of("kept"), [None])
    store.grant(lease_of("lost"), [None])
    owned(store, 1, "kept")
    assert states(store) == (2, 0, 2, 0)
    owned(store, 1, "kept")
    assert states(store) == (2, 0, 2, 0)
    owned(store, 2, "kept")
    assert states(store) == (3, 0, 1, 0)


def test_a_list_with_it_starts_the_count_anew(store: StoreDriver) -> None:
    store.grant(lease_of(), [None])
    owned(store, 1)
    owned(store, 2, "r")
    owned(store, 3)
    assert states(store) == (3, 0, 1, 0)
    owned(store, 4)
    assert states(store) == (4, 0, 0, 0)


def test_a_silent_writers_slots_are_quarantined_and_its_pins_end(
    store: StoreDriver,
) -> None:
    store.store(A)
    granted = store.grant(lease_of(), [A, B, None])
    assert granted.slots[0].existing is not None
    store.wait(RULES.silence_s * 2)
    assert states(store) == (1, 1, 0, 2)
    assert store.machine.load().pins == 0
    # it is not believed to have stopped writing until it says so, or is over
    answer = store.answer(store.put_begin(lease_of(), [C]))
    assert isinstance(answer, Failure)
    assert answer.code == "expired"
    assert store.commit_all(lease_of(), granted) == (BlockState.STALE,) * 2


def test_a_store_that_was_cut_off_blames_nobody(store: StoreDriver) -> None:
    store.grant(lease_of(), [None])
    for _ in range(10):
        store.wait(RULES.silence_s / 2)
        store.handle(Deaf())
    assert states(store) == (3, 0, 1, 0)
    store.wait(RULES.silence_s * 2)
    assert states(store) == (3, 0, 0, 1)


@pytest.mark.parametrize("end", ["release", "lists", "gone", "restarted", "unplugged"])
def test_what_ends_a_quarantine(store: StoreDriver, end: str) -> None:
    store.grant(lease_of(), [A, None])
    store.wait(RULES.silence_s * 2)
    assert states(store) == (2, 0, 0, 2)
    match end:
        case "release":
            store.release(lease_of())
        case "lists":
            owned(store, 1)
            owned(store, 2)
        case "gone":
            store.handle(OwnerGone(WRITER))
        case "restarted":
            store.handle(OwnerUp(AGAIN))
        case _:
            store.handle(ConnectionGone(WRITER))
    assert states(store) == (4, 0, 0, 0)
    assert store.machine.load().leases == 0


def test_a_connection_that_ends_takes_no_live_lease_away(store: StoreDriver) -> None:
    store.grant(lease_of(), [None])
    store.handle(ConnectionGone(WRITER))
    assert states(store) == (3, 0, 1, 0)
    # but it spares the quarantine when the owner is then silent
    store.wait(RULES.silence_s * 2)
    assert states(store) == (4, 0, 0, 0)


def test_a_life_that_is_over_is_heard_no_more(store: StoreDriver) -> None:
    store.grant(lease_of(), [A])
    store.handle(OwnerUp(AGAIN))
    assert states(store) == (4, 0, 0, 0)
    answer = store.answer(store.put_begin(lease_of("late"), [B]))
    assert isinstance(answer, Failure)
    assert answer.code == "fenced"
    assert store.machine.tally.fenced_messages == 1


def test_a_life_that_was_given_up_too_early_may_come_back(store: StoreDriver) -> None:
    store.handle(OwnerGone(WRITER))
    assert isinstance(store.answer(store.put_begin(lease_of(), [A])), Failure)
    store.handle(OwnerUp(WRITER))
    assert isinstance(store.answer(store.put_begin(lease_of(), [A])), PutGranted)


def test_a_lease_belongs_to_its_owner(store: StoreDriver) -> None:
    answer = store.answer(store.put_begin(lease_of(), [A]), CONDUCTOR)
    assert isinstance(answer, Failure)
    assert answer.code == "not_owner"


# ---- bad copies


def test_a_bad_copy_is_dropped_and_its_slot_rests(store: StoreDriver) -> None:
    store.store(A)
    report = BadCopy(located=store.truth[A], reason="test")
    assert isinstance(store.answer(report, CONDUCTOR), Ack)
    store.answer(report, CONDUCTOR)
    assert len(store.verifies) == 1
    store.settle(good=False)
    store.wait(0.05)
    assert store.truth == {}
    assert states(store) == (3, 0, 0, 1)
    store.wait(RULES.bad_slot_s)
    assert states(store) == (4, 0, 0, 0)


def test_a_false_report_changes_nothing(store: StoreDriver) -> None:
    store.store(A)
    store.answer(BadCopy(located=store.truth[A], reason="test"), CONDUCTOR)
    store.settle(good=True)
    store.wait(0.05)
    assert list(store.truth) == [A]
    assert store.machine.tally.bad_copies == 0


def test_a_report_on_an_earlier_use_is_nothing(store: StoreDriver) -> None:
    store.store(A)
    old = store.truth[A]
    store.store(*KEYS[10:14])
    store.answer(BadCopy(located=old, reason="test"), CONDUCTOR)
    assert store.verifies == []


def test_a_pinned_bad_copy_is_dropped_too(store: StoreDriver) -> None:
    store.store(A)
    store.grant(lease_of(), [A])
    store.answer(BadCopy(located=store.truth[A], reason="test"), CONDUCTOR)
    store.settle(good=False)
    assert store.machine.load().pins == 0
    store.release(lease_of())
    assert states(store) == (3, 0, 0, 1)


def test_a_lease_pins_the_new_use_of_a_slot_that_it_pinned_before() -> None:
    store = StoreDriver(StoreRules(arena_bytes=1024, slab_bytes=1024, bad_slot_s=1))
    store.store(A)
    store.grant(lease_of(), [A])
    store.answer(BadCopy(located=store.truth[A], reason="test"), CONDUCTOR)
    store.settle(good=False)
    store.wait(2)
    store.store(B)
    store.grant(lease_of(), [B])
    assert store.machine.load().pins == 1
    store.store(C)
    assert set(store.truth) == {B}
    store.release(lease_of())
    assert states(store) == (0, 1, 0, 0)
