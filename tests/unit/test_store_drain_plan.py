"""What a store that leaves has moved, and by whom. Pure."""

from dataclasses import dataclass, field

from hypothesis import given, settings, strategies as st

from kvtide.bus.messages import DrainPhase, Dropped
from kvtide.kv import BlockKey, Located, NodeId, NodeRef, SlotRef, Tier
from kvtide.store.drain import Drain, DrainRules, Order, Peer

SIZE = 100
ME = NodeId("me")
RULES = DrainRules(asked=4, order_s=5.0, full_s=10.0)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def ref(name: str) -> NodeRef:
    return NodeRef(NodeId(name), 1)


def copy(block: BlockKey, store: str) -> Located:
    generation = int.from_bytes(block, "big") + 1
    slot = SlotRef(NodeId(store), 1, Tier.DRAM, 0, generation * 64, SIZE, generation)
    return Located(block, slot, generation)


@dataclass
class World:
    """A drain, and peers with so many bytes free."""

    count: int = 10
    force: bool = False
    room: dict[str, int] = field(default_factory=dict[str, int])
    leases: int = 0
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.drain = Drain(ME, force=self.force, rules=RULES)
        self.drain.own({key(n): SIZE for n in range(self.count)})

    def tells(self, store: str, *blocks: BlockKey) -> None:
        self.drain.apply(ref(store), [copy(block, store) for block in blocks], ())

    def drops(self, store: str, *blocks: BlockKey) -> None:
        gone = [Dropped(block, copy(block, store).slot.generation) for block in blocks]
        self.drain.apply(ref(store), (), gone)

    def tick(self, seconds: float = 0.1) -> list[Order]:
        self.now_s += seconds
        peers = [Peer(ref(name), room) for name, room in self.room.items()]
        return self.drain.tick(peers, self.leases, self.now_s)

    @property
    def left(self) -> int:
        return self.drain.state(self.leases).left


def test_only_what_nobody_else_has_is_moved_to_who_has_most_room() -> None:
    world = World(room={"b": 1000, "c": 700})
    world.tells("b", key(0), key(1))
    world.tells("me", key(2))
    assert world.drain.looked() == [Order(NodeId("b"), (key(0), key(1)))]
    orders = {order.store: order.keys for order in world.tick()}
    assert {len(keys) for keys in orders.values()} == {4}
    assert not {key(0), key(1)} & {k for keys in orders.values() for k in keys}
    for store, keys in orders.items():
        world.tells(store, *keys)
    world.tick()
    assert world.drain.phase is DrainPhase.LEAVING
    state = world.drain.state(0)
    assert (state.left, state.moved, state.moved_bytes) == (0, 8, 800)


def test_without_room_it_waits_and_goes_on_when_there_is_some() -> None:
    world = World(count=3, room={"b": 150})
    world.drain.looked()
    ((order),) = world.tick()
    world.tells("b", *order.keys)
    world.room["b"] = 50
    assert world.tick() == []
    assert world.drain.phase is DrainPhase.NO_ROOM
    assert "no other store has room for 2 blocks" in world.drain.reason
    world.room["b"] = 1000
    (order,) = world.tick()
    assert len(order.keys) == 2
    assert world.drain.phase is DrainPhase.MOVING


def test_force_leaves_behind_what_has_no_room() -> None:
    world = World(count=3, force=True)
    world.drain.looked()
    assert world.tick() == []
    assert world.drain.phase is DrainPhase.LEAVING
    assert world.drain.reason == "leaves 3 blocks behind"


def test_a_store_that_takes_nothing_counts_as_full_and_others_get_its_share() -> None:
    world = World(count=4, room={"b": 5000, "c": 1000})
    world.drain.looked()
    (order,) = world.tick()
    assert order.store == "b"
    assert world.tick(4.0) == []
    (again,) = world.tick(2.0)
    assert again.store == "c"
    assert set(again.keys) == set(order.keys)


def test_what_a_dead_store_had_taken_is_moved_again() -> None:
    world = World(count=4, room={"b": 1000})
    world.drain.looked()
    (order,) = world.tick()
    world.tells("b", *order.keys[:2])
    assert world.left == 2
    world.drain.forget(NodeId("b"))
    del world.room["b"]
    world.room["c"] = 1000
    (again,) = world.tick()
    assert (again.store, set(again.keys)) == ("c", set(order.keys))


def test_copies_at_stores_that_leave_too_do_not_count() -> None:
    world = World(count=4, room={"c": 1000})
    world.tells("b", *(key(n) for n in range(4)))
    world.drain.leaving([NodeId("b")])
    assert world.left == 4
    world.drain.leaving([])
    assert world.left == 0


def test_it_waits_for_leases_but_not_for_ever() -> None:
    world = World(count=0, leases=2)
    world.drain.looked()
    world.tick()
    assert world.drain.phase is DrainPhase.FINISHING
    world.tick(RULES.lease_s + 1.0)
    assert world.drain.phase is DrainPhase.LEAVING


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_it_never_leaves_while_a_block_is_nowhere_else(data: st.DataObject) -> None:
    world = World(count=8, room={"b": 500, "c": 500})
    truth: dict[str, set[BlockKey]] = {"b": set(), "c": set()}
    world.drain.looked()
    asked: list[Order] = []
    for _ in range(data.draw(st.integers(1, 60))):
        store = data.draw(st.sampled_from(["b", "c"]))
        match data.draw(st.sampled_from(["take", "take", "drop", "die", "tick"])):
            case "take" if asked:
                order = asked.pop(0)
                truth[order.store] |= set(order.keys)
                world.tells(order.store, *order.keys)
            case "drop" if truth[store]:
                block = data.draw(st.sampled_from(sorted(truth[store])))
                truth[store].discard(block)
                world.drops(store, block)
            case "die":
                truth[store] = set()
                asked = [order for order in asked if order.store != store]
                world.drain.forget(NodeId(store))
            case _:
                world.now_s += data.draw(st.floats(0.0, 6.0))
        for name, held in truth.items():
            world.room[name] = 500 - SIZE * len(held)
        asked += world.tick(0.0)
        elsewhere = truth["b"] | truth["c"]
        state = world.drain.state(0)
        assert state.left == state.blocks - len(elsewhere)
        assert state.left_bytes == SIZE * state.left
        if world.drain.phase is DrainPhase.LEAVING:
            assert state.left == 0
            return
