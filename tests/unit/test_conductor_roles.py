"""Workers move between prefill and decode, rarely, and never the last one of a role."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
from hypothesis import given, settings, strategies as st
from tests.unit.conductor_cluster import FACTS, beat, ref

from kvtide.bus.messages import Beat, DecodeLoad, NodeState, PrefillLoad
from kvtide.conductor.commands import TellWorker
from kvtide.conductor.reducers.membership import Membership
from kvtide.conductor.reducers.roles import RoleRules, Roles
from kvtide.kv import Role

RULES = RoleRules(hold_s=10, rest_s=30, repeat_s=5, limit_s=60)
ME = ref("c1")


def worker(
    name: str, roles: Sequence[Role], *, queue_ms: float = 0.0, used: int = 0
) -> Beat:
    return Beat(
        node=ref(name),
        roles=tuple(roles),
        seq=1,
        host="h",
        state=NodeState.READY,
        steps=0,
        load=(
            PrefillLoad(queue_ms=queue_ms),
            DecodeLoad(kv_tokens_capacity=100, kv_tokens_used=used),
        ),
        models=(FACTS,),
        capable=(Role.PREFILL, Role.DECODE),
    )


class World:
    def __init__(self) -> None:
        self.members = Membership()
        self.roles = Roles(self.members, RULES)
        self.now_s = 100.0
        self.say(beat("c1", Role.CONDUCTOR))

    def say(self, *beats: Beat) -> None:
        for each in beats:
            self.members.seen(each)
            self.roles.seen(each)

    def ticks(self, seconds: float) -> list[TellWorker]:
        told: list[TellWorker] = []
        for _ in range(int(seconds * 2)):
            self.now_s += 0.5
            told += self.roles.tick(ME, self.now_s)
        return told


def busy_prefill(world: World) -> None:
    world.say(
        worker("w1", [Role.PREFILL], queue_ms=20_000),
        worker("w2", [Role.DECODE], used=40),
        worker("w3", [Role.DECODE], used=5),
    )


def test_the_least_loaded_worker_moves_once_the_balance_stayed_off() -> None:
    world = World()
    busy_prefill(world)
    assert world.ticks(9) == []
    told = world.ticks(3)
    assert [(each.worker, each.inbox) for each in told] == [("w3", Role.DECODE)]
    assert told[0].message.roles == (Role.PREFILL,)
    # told again until its beats say that it has changed
    assert {each.worker for each in world.ticks(11)} == {"w3"}
    world.say(worker("w3", [Role.PREFILL], queue_ms=20_000))
    # prefill is still busy, but one worker must stay with decode
    assert world.ticks(120) == []


def test_the_only_worker_of_a_role_for_a_model_stays() -> None:
    world = World()
    busy_prefill(world)
    own = replace(FACTS, name="another")
    # the least loaded one alone has one of its models for decode
    least = worker("w3", [Role.DECODE], used=5)
    world.say(msgspec.structs.replace(least, models=(FACTS, own)))
    assert {each.worker for each in world.ticks(12)} == {"w2"}


def test_where_each_worker_has_a_model_of_its_own_nobody_moves() -> None:
    world = World()
    busy_prefill(world)
    for name, used in (("w2", 40), ("w3", 5)):
        own = replace(FACTS, name=f"of {name}")
        alone = worker(name, [Role.DECODE], used=used)
        world.say(msgspec.structs.replace(alone, models=(own,)))
    assert world.ticks(120) == []


def test_workers_move_the_other_way_too() -> None:
    world = World()
    world.say(
        worker("w1", [Role.DECODE], used=95),
        worker("w2", [Role.PREFILL], queue_ms=100),
        worker("w3", [Role.PREFILL], queue_ms=500),
    )
    told = world.ticks(12)
    assert [(each.worker, each.inbox) for each in told] == [("w2", Role.PREFILL)]
    assert told[0].message.roles == (Role.DECODE,)
    # and back, once it is prefill that has too little
    world.say(
        worker("w1", [Role.DECODE], used=5),
        worker("w2", [Role.DECODE], used=3),
        worker("w3", [Role.PREFILL], queue_ms=20_000),
    )
    assert world.ticks(25) == []
    back = world.ticks(35)
    assert {(each.worker, each.message.roles) for each in back} == {
        ("w2", (Role.PREFILL,))
    }


def test_a_move_is_followed_by_a_rest() -> None:
    world = World()
    busy_prefill(world)
    world.say(worker("w4", [Role.DECODE], used=50))
    told = world.ticks(12)
    world.say(worker(told[0].worker, [Role.PREFILL], queue_ms=20_000))
    assert world.ticks(29) == []
    assert world.ticks(15) != []


def test_a_load_that_goes_and_comes_moves_nobody() -> None:
    world = World()
    for _ in range(20):
        busy_prefill(world)
        assert world.ticks(6) == []
        world.say(worker("w1", [Role.PREFILL], queue_ms=0))
        assert world.ticks(14) == []


def test_workers_that_can_do_one_thing_only_stay() -> None:
    world = World()
    slow = PrefillLoad(queue_ms=20_000)
    world.say(beat("p1", Role.PREFILL, load=slow))
    world.say(beat("d1", Role.DECODE), beat("d2", Role.DECODE))
    assert world.ticks(60) == []
    prefill, decode = world.roles.advice()
    assert (prefill.workers, decode.workers) == (1, 2)
    assert prefill.wanted > 1
    assert decode.wanted == 1


def test_only_the_first_conductor_moves() -> None:
    world = World()
    world.say(beat("c0", Role.CONDUCTOR))
    busy_prefill(world)
    assert world.ticks(60) == []


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 4),
            st.sampled_from(
                [(Role.PREFILL,), (Role.DECODE,), (Role.PREFILL, Role.DECODE)]
            ),
            st.sampled_from([0.0, 3000.0, 50_000.0]),
            st.integers(0, 100),
        ),
        max_size=40,
    )
)
def test_no_role_is_ever_left_without_a_worker(
    story: list[tuple[int, tuple[Role, ...], float, int]],
) -> None:
    """Whatever is said, a worker is only moved from a role that another one has too."""
    world = World()
    for number, roles, queue_ms, used in story:
        world.say(worker(f"w{number}", roles, queue_ms=queue_ms, used=used))
        pending = world.roles.moving
        for told in world.ticks(6):
            if pending is None:
                giving = world.members.ready(told.inbox)
                assert len(giving) >= 2
                assert ref(told.worker) in {each.node for each in giving}
            pending = world.roles.moving
