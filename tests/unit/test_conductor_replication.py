"""Which copies a conductor has stores make and drop. Pure."""

from dataclasses import dataclass, field, replace

from hypothesis import given, settings, strategies as st
from tests.unit.conductor_cluster import BLOCK, FACTS, beat, key, keys, located, ref

from kvtide.bus.messages import (
    CandidateEstimate,
    DropExtras,
    Dropped,
    NodeState,
    Placed,
    PlacementMade,
    ReplicaReason,
    Replicate,
    StoreLoad,
)
from kvtide.conductor.commands import TellStore
from kvtide.conductor.reducers.heat import Heat
from kvtide.conductor.reducers.membership import Membership
from kvtide.conductor.reducers.prefix_index import PrefixIndex
from kvtide.conductor.reducers.replication import Replication, ReplicationRules
from kvtide.kv import BlockKey, Located, NodeId, RequestId, Role

RULES = ReplicationRules(hot=3.0, bytes_per_s=1e9, least_age_s=10.0)
SLOT = 64  # what ``located`` says


@dataclass
class World:
    """Stores a, b, c on hosts of their own, a prefill worker at each, and one mind."""

    rules: ReplicationRules = RULES
    members: Membership = field(default_factory=Membership)
    index: PrefixIndex = field(default_factory=PrefixIndex)
    now_s: float = 100.0

    def __post_init__(self) -> None:
        self.mind = Replication(self.members, self.index, self.rules)
        for name in "abc":
            self.join(name)
            self.members.seen(beat(f"p-{name}", Role.PREFILL, host=name))
        self.members.seen(beat("c1", Role.CONDUCTOR))

    def join(
        self, name: str, *, used: int = 0, state: NodeState = NodeState.READY
    ) -> None:
        load = StoreLoad(capacity_bytes=100_000, used_bytes=used)
        self.members.seen(beat(name, Role.STORE, host=name, load=load, state=state))
        self.mind.store_seen(ref(name), self.now_s)

    def has(self, store: str, *blocks: BlockKey) -> list[Located]:
        copies = [
            located(block, ref(store), generation=block[-1] + 1) for block in blocks
        ]
        self.index.apply(ref(store), copies, ())
        return copies

    def place(
        self, reuse: list[Located], worker: str, *, conductor: str = "c1"
    ) -> list[TellStore]:
        made = PlacementMade(
            conductor=ref(conductor),
            request=RequestId("r"),
            attempt=0,
            gateway=ref("g1"),
            model="demo",
            prefill=NodeId(f"p-{worker}"),
            decode=NodeId("d"),
            new_tokens=BLOCK,
            prompt_tokens=BLOCK,
            max_new_tokens=1,
            prefill_ms=1.0,
            keys=tuple(copy.key for copy in reuse),
            hold_ms=1.0,
        )
        estimate = CandidateEstimate(
            prefill=NodeId(f"p-{worker}"),
            decode=NodeId("d"),
            hit_tokens=0,
            queue_ms=0.0,
            transfer_ms=0.0,
            prefill_ms=0.0,
            ttft_ms=0.0,
            tbt_ms=0.0,
        )
        answer = Placed(
            request=RequestId("r"),
            attempt=0,
            prefill=ref(f"p-{worker}"),
            decode=ref("d"),
            reuse=tuple(reuse),
            chosen=estimate,
            reason="",
        )
        if conductor != "c1":
            self.mind.heard(made, self.now_s)
            return []
        return self.mind.placed(made, answer, self.now_s)

    def tick(self, seconds: float) -> list[TellStore]:
        self.now_s += seconds
        return self.mind.tick(ref("c1"), self.now_s)


def ordered(orders: list[TellStore]) -> dict[str, set[BlockKey]]:
    return {
        order.store: {each.key for each in order.message.located}
        for order in orders
        if isinstance(order.message, Replicate)
    }


def reasons(orders: list[TellStore]) -> set[ReplicaReason]:
    return {o.message.reason for o in orders if isinstance(o.message, Replicate)}


def test_a_prefix_loaded_from_elsewhere_is_kept_at_the_workers_host() -> None:
    world = World()
    chain = world.has("a", *keys(4))
    orders = world.place(chain, "b")
    assert ordered(orders) == {"b": set(keys(4))}
    assert reasons(orders) == {ReplicaReason.PLACEMENT}
    # it is under way: not again
    assert world.place(chain, "b") == []
    # at home there is nothing to copy
    assert World().place(World().has("a", *keys(4)), "a") == []


def test_a_little_more_than_the_host_has_is_not_worth_a_copy() -> None:
    world = World()
    own, far = world.has("b", *keys(3)), world.has("a", *keys(5, start=3))
    assert world.place([*own, *far[:3]], "b") == []
    assert ordered(world.place([*own, *far], "b")) == {"b": set(keys(5, start=3))}


def test_what_is_placed_often_gets_one_more_copy_at_the_emptiest_store() -> None:
    world = World()
    world.join("b", used=50_000)
    chain = world.has("a", *keys(4))
    assert world.place(chain, "a") == []
    world.place(chain, "a", conductor="c2")
    orders = world.place(chain, "a")
    assert ordered(orders) == {"c": set(keys(4))}
    assert reasons(orders) == {ReplicaReason.HEAT}
    world.has("c", *keys(4))
    # two copies are enough until it is twice as hot
    assert world.place(chain, "a") == []
    assert world.place(chain, "a") == []
    assert ordered(world.place(chain, "a")) == {"b": set(keys(4))}


def test_heat_decays_and_cold_copies_are_dropped_but_never_the_last_one() -> None:
    world = World()
    chain = world.has("a", *keys(4))
    orders = [order for _ in range(3) for order in world.place(chain, "a")]
    ((store, copied),) = ordered(orders).items()
    world.has(store, *copied)
    assert world.tick(5.0) == []
    (drop,) = world.tick(600.0)
    assert drop == TellStore(NodeId(store), DropExtras(keys=keys(4)))
    assert world.tick(600.0) == []
    # with the original gone, the copy is no extra one
    world = World()
    chain = world.has("a", *keys(4))
    orders = [order for _ in range(3) for order in world.place(chain, "a")]
    ((store, copied),) = ordered(orders).items()
    world.has(store, *copied)
    world.index.forget(NodeId("a"))
    assert world.tick(600.0) == []


def test_a_new_store_is_filled_gradually_hottest_first() -> None:
    rules = ReplicationRules(
        hot=100.0, fill_batch=2, bytes_per_s=SLOT, burst_s=4.0, least_age_s=1e9
    )
    world = World(rules)
    warm, hot = world.has("a", *keys(3)), world.has("a", *keys(3, start=10))
    for _ in range(3):
        world.place(warm, "a")
    for _ in range(5):
        world.place(hot, "a")
    assert world.tick(1.0) == []  # nobody is new
    world.now_s += 20.0
    world.join("d")
    first = world.tick(2.0)
    assert ordered(first) == {"d": set(keys(2, start=10))}
    assert reasons(first) == {ReplicaReason.FILL}
    world.has("d", *keys(2, start=10))
    assert ordered(world.tick(2.0)) == {"d": {key(12), key(0)}}
    # a tenth of a second later nothing is due
    assert world.tick(0.1) == []
    # and another conductor, which is not the first, leaves it alone
    assert world.mind.tick(ref("c2"), world.now_s + 5.0) == []


def test_stores_that_leave_get_no_copies_and_count_for_none() -> None:
    world = World()
    world.join("c", state=NodeState.DRAINING)
    world.join("b", state=NodeState.DRAINING)
    chain = world.has("a", *keys(2))
    assert [order for _ in range(9) for order in world.place(chain, "a")] == []
    assert world.place(chain, "b") == []


def test_extra_copies_take_a_share_of_a_store_and_no_more() -> None:
    world = World(ReplicationRules(hot=1.0, extra_share=0.01, bytes_per_s=1e9))
    chain = world.has("a", *keys(40))
    copied = sum(len(found) for found in ordered(world.place(chain, "a")).values())
    assert copied == 1000 // SLOT


def test_every_copy_is_undone_however_many_are_wanted() -> None:
    rules = ReplicationRules(hot=1.0, bytes_per_s=1e9, least_age_s=1.0, made=5)
    world = World(rules)
    chain = world.has("a", *keys(40))
    ((store, copied),) = ordered(world.place(chain, "a")).items()
    assert len(copied) == rules.made
    world.has(store, *copied)
    assert ordered(world.place(chain, "a")) == {}
    (drop,) = world.tick(600.0)
    assert isinstance(drop.message, DropExtras)
    assert set(drop.message.keys) == copied


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 7),
            st.integers(1, 6),
            st.sampled_from("abc"),
            st.floats(0, 40),
        ),
        max_size=40,
    )
)
def test_orders_keep_to_the_limits_whatever_is_placed(
    steps: list[tuple[int, int, str, float]],
) -> None:
    rules = ReplicationRules(
        hot=2.0, bytes_per_s=10 * SLOT, burst_s=2.0, extra_share=0.01, least_age_s=5.0
    )
    world = World(rules)
    chains = {n: world.has("abc"[n % 3], *keys(6, start=10 * n)) for n in range(8)}
    began_s, ordered_bytes = world.now_s, 0
    there: dict[str, set[BlockKey]] = {name: set() for name in "abc"}
    for number, length, worker, seconds in steps:
        orders = world.place(chains[number][:length], worker) + world.tick(seconds)
        for order in orders:
            match order.message:
                case Replicate(located=found):
                    new = {each.key for each in found}
                    holders = {each.slot.node for each in found}
                    assert order.store not in holders
                    assert not new & there[order.store]
                    there[order.store] |= new
                    ordered_bytes += SLOT * len(new)
                    world.has(order.store, *new)
                case DropExtras(keys=cold):
                    assert set(cold) <= there[order.store]
                    there[order.store] -= set(cold)
                    gone = [Dropped(each, each[-1] + 1) for each in cold]
                    world.index.apply(ref(order.store), (), gone)
        assert all(SLOT * len(extra) <= 1000 for extra in there.values())
        spent_s = world.now_s - began_s + rules.burst_s
        assert ordered_bytes <= rules.bytes_per_s * spent_s + SLOT


def test_heat_is_bounded_and_halves() -> None:
    heat = Heat(half_life_s=10.0, tracked=100)
    for number in range(150):
        heat.add(key(number), 0.0)
    assert len(heat) == 100
    assert heat.of(key(0), 0.0) == 0.0
    assert heat.of(key(149), 10.0) == 0.5
    heat.add(key(149), 10.0)
    assert heat.hottest(1, 10.0, 0.1) == [key(149)]
    assert heat.hottest(9, 1000.0, 0.1) == []


def test_prefill_goes_where_blocks_can_still_be_pooled() -> None:
    members = Membership()
    for name in "ab":
        members.seen(beat(f"s-{name}", Role.STORE, host=name))
        members.seen(beat(f"p-{name}", Role.PREFILL, host=name))
    line = members.line("demo")
    assert line is not None
    assert line.prefills == (NodeId("p-a"), NodeId("p-b"))
    members.seen(beat("s-a", Role.STORE, host="a", state=NodeState.DRAINING))
    line = members.line("demo")
    assert line is not None
    assert line.prefills == (NodeId("p-b"),)
    # rather without pooling than not at all
    members.seen(beat("s-b", Role.STORE, host="b", state=NodeState.DRAINING))
    line = members.line("demo")
    assert line is not None
    assert line.prefills == (NodeId("p-a"), NodeId("p-b"))


def test_of_two_models_with_one_name_the_one_that_is_asked_for_is_taken() -> None:
    members = Membership()
    other = replace(FACTS, digest="other")
    seeing = replace(FACTS, pictures=True)
    for name, facts in (("a", FACTS), ("b", seeing), ("c", other)):
        members.seen(beat(f"d-{name}", Role.DECODE, models=(facts,)))
    most = members.line("demo")
    assert most is not None
    # whether it sees pictures makes it no other model
    assert most.decodes == (NodeId("d-a"), NodeId("d-b"))
    asked = members.line("demo", "other")
    assert asked is not None
    assert asked.decodes == (NodeId("d-c"),)
    assert members.line("demo", "a third") is None
