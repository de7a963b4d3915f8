"""The prefix index against a plain dictionary."""

import tracemalloc

from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.unit.conductor_cluster import key, located, ref

from kvtide.bus.messages import Dropped
from kvtide.conductor.reducers.prefix_index import PrefixIndex
from kvtide.kv import BlockKey, Located, NodeId, NodeRef, SlotRef, Tier

STORES = st.sampled_from(["s1", "s2", "s3"])
KEYS = st.integers(0, 12).map(key)
USES = st.integers(1, 4)


class IndexAgainstTruth(RuleBasedStateMachine):
    """Applies the same changes to the index and to a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.epochs = {"s1": 1, "s2": 1, "s3": 1}
        self.truth: dict[tuple[str, BlockKey, Tier], Located] = {}

    @rule(name=STORES, block=KEYS, use=USES, tier=st.sampled_from(list(Tier)))
    def add(self, name: str, block: BlockKey, use: int, tier: Tier) -> None:
        store = ref(name, self.epochs[name])
        copy = located(block, store, generation=use, tier=tier)
        self.index.apply(store, [copy], [])
        self.truth[name, block, tier] = copy

    @rule(name=STORES, block=KEYS, use=USES)
    def drop(self, name: str, block: BlockKey, use: int) -> None:
        self.index.apply(ref(name, self.epochs[name]), [], [Dropped(block, use)])
        self._lose_use(name, block, use)

    @rule(name=STORES, block=KEYS, use=USES)
    def replace(self, name: str, block: BlockKey, use: int) -> None:
        """One change that drops and adds the same key: the add must win."""
        store = ref(name, self.epochs[name])
        copy = located(block, store, generation=use)
        self.index.apply(store, [copy], [Dropped(block, use)])
        self._lose_use(name, block, use)
        self.truth[name, block, Tier.DRAM] = copy

    @rule(name=STORES)
    def forget(self, name: str) -> None:
        self.index.forget(NodeId(name))
        self._lose(name)

    @rule(name=STORES, block=KEYS)
    def restart(self, name: str, block: BlockKey) -> None:
        self.epochs[name] += 1
        self._lose(name)
        self.add(name, block, 1, Tier.DRAM)

    @rule(name=STORES, block=KEYS)
    def old_news(self, name: str, block: BlockKey) -> None:
        self.index.apply(ref(name, self.epochs[name]), [], [])
        old = ref(name, self.epochs[name] - 1)
        self.index.apply(old, [located(block, old)], [Dropped(block, 1)])

    @rule(limit=st.integers(0, 20))
    def sweep(self, limit: int) -> None:
        self.index.sweep(limit)

    @invariant()
    def the_index_is_the_truth(self) -> None:
        expected: dict[BlockKey, set[Located]] = {}
        for (_, block, _), copy in self.truth.items():
            expected.setdefault(block, set()).add(copy)
        for number in range(13):
            found = self.index.prefix([key(number)])
            copies = set(found[0]) if found else set[Located]()
            assert copies == expected.get(key(number), set())
            assert not found or len(found[0]) == len(copies)
        for name in self.epochs:
            count = sum(1 for store, _, _ in self.truth if store == name)
            assert self.index.copies_at(NodeId(name)) == count
        assert self.index.copies == len(self.truth)
        assert self.index.blocks >= len(expected)

    def _lose(self, name: str) -> None:
        self.truth = {k: v for k, v in self.truth.items() if k[0] != name}

    def _lose_use(self, name: str, block: BlockKey, use: int) -> None:
        for tier in Tier:
            copy = self.truth.get((name, block, tier))
            if copy is not None and copy.slot.generation == use:
                del self.truth[name, block, tier]

    def teardown(self) -> None:
        # two whole rounds clear whatever was forgotten
        for _ in range(3):
            self.index.sweep(100)
        assert self.index.blocks == len({block for _, block, _ in self.truth})


TestIndexAgainstTruth = IndexAgainstTruth.TestCase
TestIndexAgainstTruth.settings = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_a_prefix_ends_at_the_first_hole() -> None:
    index, store = PrefixIndex(), ref("s1")
    index.apply(store, [located(key(n), store) for n in (0, 1, 3)], [])
    assert [c[0].key for c in index.prefix([key(n) for n in range(5)])] == [
        key(0),
        key(1),
    ]
    assert index.prefix([key(2), key(3)]) == []


def test_changes_that_name_another_store_or_impossible_numbers_are_ignored() -> None:
    index, store = PrefixIndex(), ref("s1")
    index.apply(store, [located(key(0), ref("s2"))], [])
    impossible = SlotRef(store.node, 1, Tier.DRAM, 1 << 40, -1, 0, 0)
    index.apply(store, [Located(key(1), impossible, 0)], [])
    assert index.copies == 0
    assert index.prefix([key(0)]) == []
    assert index.prefix([key(1)]) == []


def test_the_largest_numbers_come_back() -> None:
    index, store = PrefixIndex(), NodeRef(NodeId("s1"), 1 << 52)
    most = (1 << 64) - 1
    slot = SlotRef(store.node, store.epoch, Tier.SSD, 65_535, most, most, most)
    index.apply(store, [Located(key(0), slot, most)], [])
    assert index.prefix([key(0)]) == [(Located(key(0), slot, most),)]


def test_exactness_is_forgotten_with_the_store() -> None:
    index = PrefixIndex()
    assert not index.is_exact(NodeId("s1"))
    index.set_exact(NodeId("s1"), exact=True)
    index.apply(ref("s1"), [located(key(0), ref("s1"))], [])
    assert index.is_exact(NodeId("s1"))
    index.set_exact(NodeId("s1"), exact=False)
    assert not index.is_exact(NodeId("s1"))
    index.set_exact(NodeId("s1"), exact=True)
    index.forget(NodeId("s1"))
    assert not index.is_exact(NodeId("s1"))


def test_a_block_takes_less_than_400_bytes() -> None:
    blocks = 50_000
    store = ref("s1")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        index = PrefixIndex()
        for number in range(blocks):
            index.apply(store, [located(key(number), store)], [])
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert index.blocks == blocks
    assert (after - before) / blocks < 400


def test_life_numbers_are_used_again_after_a_sweep() -> None:
    index = PrefixIndex()
    for epoch in range(1, 70_000):
        store = ref("s1", epoch)
        index.apply(store, [located(key(epoch % 7), store)], [])
        index.sweep(10)
    assert index.copies == 1
    assert len(index.prefix([key(69_999 % 7)])[0]) == 1


def test_stores_that_are_gone_take_no_memory() -> None:
    """A follower says that a store is not known exactly after it said to forget it."""
    index = PrefixIndex()
    names = [NodeId(f"store-{number}") for number in range(20_000)]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for name in names:
            index.set_exact(name, exact=True)
            index.forget(name)
            index.set_exact(name, exact=False)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 100_000
