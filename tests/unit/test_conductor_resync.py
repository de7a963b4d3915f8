"""The index is what stores hold, after gossip that was lost, doubled or late."""

from dataclasses import dataclass, field

from hypothesis import given, settings, strategies as st
from tests.unit.conductor_cluster import beat, key, located, ref

from kvtide.bus import Joined, Member
from kvtide.bus.following import Apply, BlockFollowing, Exact, Forget, Pull
from kvtide.bus.messages import BlocksChanged, Dropped, SnapshotPage, StoreLoad
from kvtide.conductor.reducers.prefix_index import PrefixIndex
from kvtide.kv import BlockKey, Located, NodeRef, Role


@dataclass
class Store:
    """What a store holds, and what it says of it."""

    ref: NodeRef
    held: dict[BlockKey, Located] = field(default_factory=dict[BlockKey, Located])
    seq: int = 0
    uses: int = 0

    def change(self, block: int) -> BlocksChanged:
        """A block comes, or goes if it is there."""
        self.seq += 1
        self.uses += 1
        gone = self.held.pop(key(block), None)
        if gone is not None:
            drop = Dropped(gone.key, gone.slot.generation)
            return BlocksChanged(
                store=self.ref, seq=self.seq, added=(), dropped=(drop,)
            )
        copy = located(key(block), self.ref, generation=self.uses)
        self.held[copy.key] = copy
        return BlocksChanged(store=self.ref, seq=self.seq, added=(copy,), dropped=())

    def page(self, pull: Pull) -> SnapshotPage:
        keys = sorted(k for k in self.held if pull.after is None or k > pull.after)
        taken = keys[:3]
        return SnapshotPage(
            store=self.ref,
            seq=self.seq,
            located=tuple(self.held[k] for k in taken),
            next_key=taken[-1] if len(keys) > len(taken) else None,
        )


class World:
    """A follower that feeds an index, and one store."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.following = BlockFollowing(ref("c1").node)
        self.store = Store(ref("s1"))
        self.pulls: list[Pull] = []
        self.now_s = 100.0

    def do(self, commands: list[Apply | Forget | Exact | Pull]) -> None:
        for command in commands:
            match command:
                case Apply(store, added, dropped):
                    self.index.apply(store, added, dropped)
                case Forget(store):
                    self.index.forget(store)
                case Exact(store, exact):
                    self.index.set_exact(store, exact=exact)
                case Pull():
                    self.pulls.append(command)

    def joins(self) -> None:
        load = StoreLoad(seq=self.store.seq)
        member = Member(beat("s1", Role.STORE, load=load), self.now_s, self.now_s)
        self.do(self.following.member(Joined(member), self.now_s))

    def answer_pulls(self) -> None:
        pulls, self.pulls = self.pulls, []
        for pull in pulls:
            page = self.store.page(pull)
            self.do(self.following.page(pull.number, page, self.now_s))

    def time_passes(self) -> None:
        self.now_s += 0.5
        self.do(self.following.tick(self.now_s))

    def indexed(self) -> dict[BlockKey, set[Located]]:
        found = {key(n): self.index.prefix([key(n)]) for n in range(8)}
        return {name: set(copies[0]) for name, copies in found.items() if copies}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 7), max_size=6),
    st.lists(
        st.tuples(
            st.integers(0, 7), st.sampled_from(["lost", "once", "twice", "late"])
        ),
        max_size=25,
    ),
    st.lists(st.integers(0, 7), max_size=8),
)
def test_after_a_resync_the_index_is_the_truth(
    held: list[int], said: list[tuple[int, str]], warm: list[int]
) -> None:
    world = World()
    for block in held:
        world.store.change(block)
    # a catalog may be wrong in any way
    world.index.warm(
        world.store.ref, [located(key(n), world.store.ref, generation=99) for n in warm]
    )
    world.joins()
    assert not world.index.is_exact(world.store.ref.node)
    late: list[BlocksChanged] = []
    for block, way in said:
        change = world.store.change(block)
        if way == "late":
            late.append(change)
        for _ in range({"once": 1, "twice": 2}.get(way, 0)):
            world.do(world.following.changed(change, world.now_s))
        world.time_passes()
        world.answer_pulls()
    for change in late:
        world.do(world.following.changed(change, world.now_s))
    # one more change tells of what was lost
    world.do(world.following.changed(world.store.change(0), world.now_s))
    for _ in range(40):
        world.time_passes()
        world.answer_pulls()
    assert world.index.is_exact(world.store.ref.node)
    assert world.indexed() == {name: {copy} for name, copy in world.store.held.items()}
    assert world.index.copies == len(world.store.held)


def test_a_catalog_is_believed_until_the_store_speaks() -> None:
    index, store = PrefixIndex(), ref("s1")
    hint = located(key(1), store)
    assert index.warm(store, [hint])
    assert index.prefix([key(1)]) == [(hint,)]
    assert not index.is_exact(store.node)
    index.apply(store, [located(key(2), store)], [])
    assert not index.warm(store, [located(key(3), store)])
    assert index.prefix([key(3)]) == []
    index.forget(store.node)
    index.set_exact(store.node, exact=True)
    assert not index.warm(store, [hint])
