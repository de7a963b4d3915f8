# pyright: reportUnknownMemberType=false
"""What the pool holds, as a reader of vLLM's events understands it."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from hypothesis import given, settings, strategies as st
from tests.unit.test_router_cache import FACTS, KEYS, PROMPT, SPACE

from kvtide.bus.messages import Dropped
from kvtide.connect.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvEventBatch,
    encode_batch,
)
from kvtide.connect.kv_publisher import KvPublisher
from kvtide.connect.pool_events import PoolEvents, hash_of
from kvtide.kv import BlockKey, KeySpace, Located, NodeId, NodeRef, SlotRef, Tier
from kvtide.runtime import SystemClock

STORES = [NodeRef(NodeId(name), 1) for name in ("a", "b")]


# vLLM 0.32's own classes, as in vllm/distributed/kv_events.py


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class TheirStored(KVCacheEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class TheirRemoved(KVCacheEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class TheirCleared(KVCacheEvent, tag="AllBlocksCleared"):
    pass


class KVEventBatch(EventBatch):
    events: list[TheirStored | TheirRemoved | TheirCleared]


THEIRS = msgspec.msgpack.Decoder(KVEventBatch)


class Subscriber:
    """What a router believes: hash to parent, tokens; it never sees a broken chain."""

    def __init__(self) -> None:
        self.blocks: dict[bytes | int, tuple[bytes | int | None, list[int]]] = {}

    def take(self, events: Sequence[KvEvent]) -> None:
        payload = encode_batch(KvEventBatch(1.0, tuple(events), 0))
        for event in THEIRS.decode(payload).events:
            match event:
                case TheirStored():
                    self._stored(event)
                case TheirRemoved():
                    for each in event.block_hashes:
                        del self.blocks[each]
                case TheirCleared():
                    self.blocks.clear()

    def _stored(self, event: TheirStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        assert parent is None or parent in self.blocks
        assert len(event.token_ids) == size * len(event.block_hashes)
        for number, each in enumerate(event.block_hashes):
            assert each not in self.blocks
            tokens = event.token_ids[number * size : (number + 1) * size]
            self.blocks[each] = (parent, tokens)
            parent = each


def located(key: BlockKey, store: NodeRef, generation: int = 1) -> Located:
    slot = SlotRef(store.node, store.epoch, Tier.DRAM, 0, 0, 64, generation)
    return Located(key, slot, 0)


def test_a_chain_is_told_of_once_its_tokens_and_copies_are_known() -> None:
    pool, router = PoolEvents(), Subscriber()
    store, other = STORES
    assert pool.apply(store, [located(key, store) for key in KEYS[:3]], []) == []
    (event,) = pool.learn(SPACE, PROMPT, KEYS[:2], "")
    assert isinstance(event, BlockStored)
    assert event.block_hashes == tuple(map(hash_of, KEYS[:3]))
    assert event.token_ids == PROMPT[: 3 * FACTS.block_tokens]
    assert (event.parent_block_hash, event.extra_keys) == (None, None)
    router.take([event])
    (later,) = pool.apply(other, [located(key, other) for key in KEYS], [])
    assert isinstance(later, BlockStored)
    assert later.parent_block_hash == hash_of(KEYS[2])
    router.take([later])
    assert set(router.blocks) == {hash_of(key) for key in KEYS}
    assert pool.apply(store, [], [Dropped(KEYS[0], 1), Dropped(KEYS[1], 9)]) == []
    (gone,) = pool.apply(other, [], [Dropped(KEYS[0], 1)])
    assert gone == BlockRemoved((hash_of(KEYS[0]),), medium="CPU")
    router.take([gone])
    (none,) = [*pool.forget(other.node)]
    assert none == BlockRemoved((hash_of(KEYS[3]),), medium="CPU")
    assert pool.forget(store.node) == [AllBlocksCleared()]
    assert pool.told == 0


def test_a_space_of_its_own_is_named_with_the_first_block() -> None:
    pool = PoolEvents()
    store = STORES[0]
    pool.apply(store, [located(key, store) for key in KEYS], [])
    (event,) = pool.learn(SPACE, PROMPT, KEYS, "acme/x")
    assert isinstance(event, BlockStored)
    assert event.extra_keys == (("acme/x",), None, None, None)


def test_an_adapters_blocks_are_told_of_under_its_name() -> None:
    adapted = FACTS.adapted("fables", "d" * 64)
    space = KeySpace(b"s" * 32, replace(SPACE.space, facts=adapted))
    keys, pool, store = space.chain(PROMPT), PoolEvents(), STORES[0]
    pool.apply(store, [located(key, store) for key in (*keys, *KEYS)], [])
    (event,) = pool.learn(space, PROMPT, keys)
    (base,) = pool.learn(SPACE, PROMPT, KEYS)
    assert isinstance(event, BlockStored)
    assert isinstance(base, BlockStored)
    assert (event.lora_name, base.lora_name) == ("fables", None)
    assert event.token_ids == base.token_ids


FORKS = [(*PROMPT[:128], *range(n, n + 128)) for n in (500, 600)]
CHAINS = [PROMPT, *FORKS]
ALL_KEYS = sorted({key for chain in CHAINS for key in SPACE.chain(chain)})
steps = st.lists(
    st.tuples(st.just("learn"), st.sampled_from(CHAINS), st.none())
    | st.tuples(
        st.sampled_from(["add", "drop"]),
        st.lists(st.sampled_from(ALL_KEYS), max_size=4),
        st.sampled_from(STORES),
    )
    | st.tuples(st.just("forget"), st.none(), st.sampled_from(STORES)),
    max_size=20,
)


@settings(deadline=None, max_examples=80)
@given(steps)
def test_a_subscriber_believes_nothing_that_is_not_there(
    happened: list[tuple[str, Any, NodeRef]],
) -> None:
    pool, router = PoolEvents(), Subscriber()
    copies: dict[NodeId, set[BlockKey]] = {store.node: set() for store in STORES}
    for kind, what, store in happened:
        if kind == "learn":
            router.take(pool.learn(SPACE, what, SPACE.chain(what), ""))
        elif kind == "add":
            copies[store.node] |= set(what)
            router.take(pool.apply(store, [located(k, store) for k in what], []))
        elif kind == "drop":
            copies[store.node] -= set(what)
            router.take(pool.apply(store, [], [Dropped(k, 1) for k in what]))
        else:
            copies[store.node].clear()
            router.take(pool.forget(store.node))
        there = {hash_of(key) for held in copies.values() for key in held}
        assert set(router.blocks) <= there
        assert len(router.blocks) == pool.told
    tokens: dict[bytes | int, list[int]] = {
        hash_of(k): t for chain in CHAINS for k, t in _blocks(SPACE, chain)
    }
    assert all(tokens[name] == said for name, (_, said) in router.blocks.items())


def _blocks(space: KeySpace, chain: Sequence[int]) -> list[tuple[BlockKey, list[int]]]:
    size = space.layout.block_tokens
    return [
        (key, list(chain[n * size : (n + 1) * size]))
        for n, key in enumerate(space.chain(chain))
    ]


def test_contents_are_bounded() -> None:
    pool = PoolEvents(most_known=3)
    store = STORES[0]
    pool.learn(SPACE, PROMPT, KEYS, "")
    assert pool.apply(store, [located(KEYS[0], store)], []) == []


async def test_what_was_missed_is_repeated_as_vllm_does() -> None:
    publisher = KvPublisher(
        "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv", SystemClock(), kept=2
    )
    publisher.open()
    _, replay = publisher.addresses()
    try:
        async with asyncio.timeout(20):
            task = asyncio.ensure_future(publisher.run())
            for number in range(3):
                publisher.post([BlockRemoved((number,), medium="CPU")])
            while not (found := await _asked(replay, 2))[:-1]:
                pass  # not sent yet
            found = await _asked(replay, 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    finally:
        publisher.close()
    assert [(topic, number) for topic, number, _ in found] == [
        (b"kv", 1),
        (b"kv", 2),
        (b"", -1),
    ]
    (event,) = THEIRS.decode(found[0][2]).events
    assert event == TheirRemoved([1], "CPU")


async def _asked(address: str, start: int) -> list[tuple[bytes, int, bytes]]:
    """As ``examples/online_serving/kv_events_subscriber.py`` of vLLM asks."""
    found: list[tuple[bytes, int, bytes]] = []
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        await socket.send_multipart((b"", start.to_bytes(8, "big")))
        while not found or found[-1][1] >= 0:
            _, topic, number, payload = await socket.recv_multipart()
            found.append((topic, int.from_bytes(number, "big", signed=True), payload))
    return found
