"""An engine's KV events become keys of the index, as gateways derive them."""

import pytest
from hypothesis import given, settings, strategies as st

from kvtide.bus.messages import BlocksChanged, SnapshotPull
from kvtide.connect.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
)
from kvtide.kv import BlockKey, KeySpace, ModelFacts, NodeId, NodeRef, SpaceId, TenantId
from kvtide.router.cache_map import CacheMap, Moved
from kvtide.router.event_order import EventOrder, Step
from kvtide.router.salts import MOST_SALT_CHARS, Salts
from kvtide.router.shelf import Shelf

SECRET = b"s" * 32
ME = NodeRef(NodeId("engine-1"), 5)
TENANT = TenantId("acme")
FACTS = ModelFacts(
    name="m",
    digest="d",
    layers=1,
    kv_heads=1,
    head_dim=1,
    kv_dtype="float16",
    vocab_size=1000,
    max_tokens=4096,
    eos_token_ids=(2,),
    numerics="engine of others",
    block_tokens=64,
    self_contained=True,
)
SPACE = KeySpace(SECRET, SpaceId(TENANT, FACTS))
SALTS = Salts(SECRET)
SALT = SALTS.of(TENANT, "")
PROMPT = tuple(range(3, 3 + 300))
KEYS = SPACE.chain(PROMPT)


def space_of(salt: str) -> KeySpace | None:
    named = SALTS.read(salt)
    return None if named is None else KeySpace(SECRET, SpaceId(named[0], FACTS))


def stored(first: int, end: int, size: int, salt: str = SALT) -> BlockStored:
    """Blocks ``first`` to ``end`` of the prompt, as vLLM says it."""
    extra = tuple((salt,) if n == 0 else None for n in range(first, end))
    return BlockStored(
        block_hashes=tuple(range(first + 1, end + 1)),
        parent_block_hash=first or None,
        token_ids=PROMPT[first * size : end * size],
        block_size=size,
        medium="GPU",
        extra_keys=extra,
        group_idx=0,
    )


def removed(*blocks: int) -> BlockRemoved:
    return BlockRemoved(tuple(n + 1 for n in blocks), medium="GPU", group_idx=0)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_keys_are_those_of_the_prompt(size: int) -> None:
    cache = CacheMap(space_of)
    count = len(PROMPT) // size
    first = cache.apply([stored(0, count // 2, size)])
    second = cache.apply([stored(count // 2, count, size)])
    assert (*first.added, *second.added) == KEYS
    assert len(cache) == len(KEYS)
    assert cache.unkeyed == 0


def test_a_block_is_there_while_all_of_its_parts_are() -> None:
    cache = CacheMap(space_of)
    cache.apply([stored(0, 8, 16)])
    assert cache.apply([removed(7)]) == Moved((), KEYS[1:2])
    assert cache.apply([removed(7)]) == Moved()
    assert cache.apply([removed(0), stored(7, 8, 16)]) == Moved(KEYS[1:2], KEYS[:1])
    assert cache.clear() == Moved((), KEYS[1:2])
    assert len(cache) == 0


def test_what_comes_and_goes_in_one_batch_is_no_change() -> None:
    cache = CacheMap(space_of)
    assert cache.apply([stored(0, 4, 64), AllBlocksCleared()]) == Moved()
    assert cache.apply([stored(0, 4, 64)]).added == KEYS
    assert cache.apply([removed(3), stored(3, 4, 64)]) == Moved()


def test_what_has_no_key_is_left_out() -> None:
    cache = CacheMap(space_of)
    other = BlockStored((1,), None, PROMPT[:64], 64, lora_name="adapter")
    image = BlockStored((2,), None, PROMPT[:64], 64, extra_keys=((("id", 0), SALT),))
    orphan = stored(1, 2, 64)
    tier = BlockStored((3,), None, PROMPT[:64], 64, medium="CPU", cache_salt=SALT)
    past_us = stored(0, 1, 64, salt="somebody's own")
    forged = stored(0, 1, 64, salt=SALT[:-6] + "AAAA==")
    for event in (other, image, orphan, tier, past_us, forged):
        assert cache.apply([event]) == Moved()
    assert cache.unkeyed == 6


def test_sglang_names_the_salt_in_a_field() -> None:
    cache = CacheMap(space_of)
    events = [
        BlockStored((n + 1,), n or None, (PROMPT[n],), 1, medium="GPU", cache_salt=SALT)
        for n in range(64)
    ]
    assert cache.apply(events).added == KEYS[:1]


def test_salts_are_read_back_and_none_is_forged() -> None:
    for salt in ("", "a", "s" * 200):
        assert SALTS.read(SALTS.of(TENANT, salt)) == (TENANT, salt)
    assert len(SALTS.of(TENANT, "x" * 5000)) <= MOST_SALT_CHARS
    assert SALTS.read(Salts(b"t" * 32).of(TENANT, "")) is None
    assert SALTS.read("kvtide.!") is None


def test_events_are_taken_in_order_whatever_is_lost_or_repeated() -> None:
    order = EventOrder()
    assert order.live(0, 10.0) is Step.APPLY
    order.taken(0, 10.0)
    assert order.live(2, 12.0) is Step.ASK
    order.taken(2, 12.0)
    assert order.live(1, 11.0) is Step.IGNORE
    assert order.live(0, 13.0) is Step.AFRESH
    order.restart()
    assert order.live(0, 13.0) is Step.APPLY


KEY_POOL = [BlockKey(n.to_bytes(16, "big")) for n in range(40)]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.sampled_from(KEY_POOL), max_size=8), max_size=12),
    st.integers(1, 7),
    st.integers(0, 11),
)
def test_pages_with_the_changes_after_them_are_what_is_there(
    flips: list[list[BlockKey]], limit: int, begin: int
) -> None:
    """As a follower puts them together, however changes and pages interleave."""
    shelf, there = Shelf(ME, 64), set[BlockKey]()
    seen: dict[BlockKey, int] = {}
    after: BlockKey | None = None
    reading, oldest = False, 0
    changes: list[BlocksChanged] = []
    for number, keys in enumerate(flips):
        gone = {key for key in keys if key in there}
        come = {key for key in keys if key not in there}
        changes += shelf.changed(Moved(tuple(come), tuple(gone)))
        there = (there | come) - gone
        if number >= begin and (number == begin or reading):
            page = shelf.page(SnapshotPull(after=after, limit=limit))
            oldest = oldest if reading else page.seq
            seen |= {each.key: each.slot.generation for each in page.located}
            after, reading = page.next_key, page.next_key is not None
    while reading:
        page = shelf.page(SnapshotPull(after=after, limit=limit))
        seen |= {each.key: each.slot.generation for each in page.located}
        after, reading = page.next_key, page.next_key is not None
    if begin >= len(flips):
        return
    for change in changes:
        if change.seq <= oldest:
            continue
        for drop in change.dropped:
            if seen.get(drop.key) == drop.generation:
                del seen[drop.key]
        seen |= {each.key: each.slot.generation for each in change.added}
    assert set(seen) == there
    assert len(shelf) == len(there)


def test_events_of_an_engine_reach_the_map_in_any_form() -> None:
    events: list[KvEvent] = [stored(0, 4, 64), removed(3)]
    cache = CacheMap(space_of)
    assert cache.apply(events).added == KEYS[:3]
