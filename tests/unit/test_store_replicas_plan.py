"""Which copies a store fetches next. Pure."""

from dataclasses import dataclass, field

from hypothesis import given, settings, strategies as st

from kvtide.bus.messages import ReplicaReason
from kvtide.kv import BlockKey, Located, NodeId, SlotRef, Tier
from kvtide.store.replicas import Fetch, ReplicaRules, Replicas

SIZE = 100
RULES = ReplicaRules(
    queued=20, in_flight=3, in_flight_bytes=3 * SIZE, bytes_per_s=1e9, wait_s=10.0
)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def copy(number: int, store: str = "a", size: int = SIZE) -> Located:
    slot = SlotRef(NodeId(store), 1, Tier.DRAM, 0, number * 64, size, number + 1)
    return Located(key(number), slot, number)


@dataclass
class World:
    """A plan, and what is here."""

    rules: ReplicaRules = RULES
    here: set[BlockKey] = field(default_factory=set[BlockKey])
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.plan = Replicas(self.rules)

    def order(
        self, *copies: Located, reason: ReplicaReason = ReplicaReason.HEAT
    ) -> tuple[int, int, int]:
        done = self.plan.order(reason, copies, self.here.__contains__, self.now_s)
        return done.here, done.queued, done.refused

    def start(self) -> list[Fetch]:
        return self.plan.start(self.here.__contains__, self.now_s)


def numbers(fetches: list[Fetch]) -> list[int]:
    return [int.from_bytes(each.source.key, "big") for each in fetches]


def test_what_is_here_or_wanted_already_is_not_fetched_again() -> None:
    world = World()
    world.here.add(key(1))
    assert world.order(copy(1), copy(2), copy(2, "b")) == (1, 1, 0)
    assert world.order(copy(2)) == (0, 1, 0)
    assert numbers(world.start()) == [2]
    assert world.order(copy(2)) == (0, 1, 0)
    assert world.start() == []
    world.plan.end(1)
    world.here.add(key(2))
    assert world.order(copy(2)) == (1, 0, 0)


def test_drains_go_first_and_an_order_may_raise_its_rank() -> None:
    world = World()
    world.order(*(copy(n) for n in range(4)), reason=ReplicaReason.FILL)
    world.order(copy(9), reason=ReplicaReason.HEAT)
    world.order(copy(3), reason=ReplicaReason.DRAIN)
    # a lower rank does not take it back
    world.order(copy(3), reason=ReplicaReason.FILL)
    started = world.start()
    assert numbers(started) == [3, 9, 0]
    assert started[0].reason is ReplicaReason.DRAIN


def test_other_sources_are_tried_one_after_the_other() -> None:
    world = World()
    world.order(copy(1, "a"), copy(1, "b"))
    (first,) = world.start()
    assert first.source.slot.node == "a"
    assert world.plan.failed(first.number, world.now_s)
    (second,) = world.start()
    assert second.source.slot.node == "b"
    assert not world.plan.failed(second.number, world.now_s)
    assert world.plan.under_way == world.plan.queued == 0


def test_orders_grow_old() -> None:
    world = World()
    world.order(*(copy(n) for n in range(5)))
    started = world.start()
    world.now_s = 10.0
    assert world.start() == []
    assert (world.plan.queued, world.plan.expired) == (0, 2)
    # what is under way may still come
    assert len(started) == world.plan.under_way == 3


def test_a_block_larger_than_the_limit_goes_alone() -> None:
    world = World()
    world.order(copy(1, size=1000), copy(2))
    (large,) = world.start()
    assert world.plan.wake_at_s() == 10.0
    world.plan.end(large.number)
    assert numbers(world.start()) == [2]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_limits_hold_and_every_order_ends(data: st.DataObject) -> None:
    rules = ReplicaRules(
        queued=15,
        in_flight=4,
        in_flight_bytes=350,
        bytes_per_s=200.0,
        burst_s=1.0,
        wait_s=20.0,
    )
    world = World(rules)
    flying: dict[int, Fetch] = {}
    fetched = 0
    for _ in range(data.draw(st.integers(5, 60))):
        match data.draw(st.sampled_from(["order", "order", "end", "fail", "wait"])):
            case "order":
                wanted = data.draw(st.lists(st.integers(0, 25), min_size=1, max_size=6))
                stores = data.draw(st.sampled_from(["a", "b", "ab"]))
                reason = data.draw(st.sampled_from(list(ReplicaReason)))
                copies = [copy(n, store) for n in wanted for store in stores]
                here, queued, refused = world.order(*copies, reason=reason)
                assert here + queued + refused == len(set(wanted))
            case "end" if flying:
                fetch = flying.pop(data.draw(st.sampled_from(sorted(flying))))
                world.plan.end(fetch.number)
                world.here.add(fetch.source.key)
            case "fail" if flying:
                fetch = flying.pop(data.draw(st.sampled_from(sorted(flying))))
                world.plan.failed(fetch.number, world.now_s)
            case _:
                world.now_s += data.draw(st.floats(0.0, 3.0))
        for fetch in world.start():
            assert fetch.source.key not in world.here
            assert all(
                fetch.source.key != other.source.key for other in flying.values()
            )
            flying[fetch.number] = fetch
            fetched += fetch.source.slot.length
        assert len(flying) == world.plan.under_way <= rules.in_flight
        assert world.plan.bytes_under_way == SIZE * len(flying) <= 350
        # one that failed comes back to its line, however long that is
        assert world.plan.queued <= rules.queued + rules.in_flight
        assert fetched <= rules.bytes_per_s * (world.now_s + rules.burst_s) + SIZE
        wake_s = world.plan.wake_at_s()
        # never a wake-up that would find nothing to do for ever
        assert wake_s is None or wake_s > world.now_s or world.start() == []
    # time alone empties the lines
    for number in list(flying):
        world.plan.end(number)
    world.now_s += 1000.0
    for fetch in world.start():
        world.plan.end(fetch.number)
    assert world.plan.queued == 0
