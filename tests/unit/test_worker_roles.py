"""Roles change when told: what is left drains first, and nothing else begins before."""

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st

from kvtide.bus import Identity, MemoryBus, MemoryHub, Node
from kvtide.bus.messages import Ack, ChangeRoles, Failure
from kvtide.kv import NodeId, NodeRef, Role
from kvtide.runtime import SystemClock, TaskScope
from kvtide.worker.roles import Begin, Leave, Offer, RoleCommand, RoleMachine
from kvtide.worker.turning import RoleKeeper

BOTH = (Role.PREFILL, Role.DECODE)


def test_a_role_is_left_at_once_and_another_begins_when_it_has_drained() -> None:
    machine = RoleMachine(BOTH)
    assert machine.want([Role.PREFILL]) == [
        Leave(Role.DECODE),
        Offer((Role.PREFILL,)),
    ]
    assert machine.want([Role.DECODE]) == [
        Leave(Role.PREFILL),
        Begin(Role.DECODE),  # it had not drained: it goes on
        Offer((Role.DECODE,)),
    ]
    assert machine.drained([Role.PREFILL]) == []
    assert machine.want([Role.PREFILL]) == [Leave(Role.DECODE), Offer(())]
    assert machine.drained([Role.PREFILL]) == [], "it was not draining"
    assert machine.drained([Role.DECODE]) == [
        Begin(Role.PREFILL),
        Offer((Role.PREFILL,)),
    ]
    assert machine.want([Role.PREFILL]) == []


@pytest.mark.parametrize("roles", [[], [Role.STORE], [Role.PREFILL, Role.GATEWAY]])
def test_what_it_can_not_do_is_refused_and_changes_nothing(roles: list[Role]) -> None:
    machine = RoleMachine(BOTH)
    with pytest.raises(ValueError, match="decode, prefill"):
        machine.want(roles)
    assert machine.offered == set(BOTH)


@given(
    st.lists(
        st.one_of(
            st.sets(st.sampled_from(BOTH), min_size=1),
            st.sampled_from(BOTH),
        ),
        max_size=30,
    )
)
def test_in_the_end_it_does_what_was_wanted_last(
    steps: list[set[Role] | Role],
) -> None:
    machine, taking, offered = RoleMachine(BOTH), set[Role](BOTH), set[Role](BOTH)

    def carry_out(commands: list[RoleCommand]) -> None:
        nonlocal offered
        for command in commands:
            match command:
                case Leave(role):
                    taking.remove(role)
                case Begin(role):
                    assert role not in taking
                    taking.add(role)
                case Offer(roles):
                    offered = set(roles)
                    assert offered == taking

    wanted = set[Role](BOTH)
    for step in steps:
        if isinstance(step, Role):
            carry_out(machine.drained([step]))
        else:
            wanted = step
            carry_out(machine.want(step))
        assert taking <= wanted
    carry_out(machine.drained(BOTH))
    assert taking == offered == wanted


@dataclass
class Service:
    """One role, idle when a test says so."""

    idle: bool = False
    taking: bool = True

    def take_work(self, *, taken: bool) -> None:
        self.taking = taken


async def test_a_keeper_turns_the_services_of_its_process() -> None:
    clock = SystemClock()
    hub = MemoryHub(clock)
    me = Identity(NodeId("w"), 1)
    async with MemoryBus(hub, me) as bus:
        node = Node(roles=BOTH, bus=bus, identity=me, clock=clock, secret=b"s" * 32)
        prefill, decode = Service(), Service()
        keeper = RoleKeeper(node, {Role.PREFILL: prefill, Role.DECODE: decode})
        other = ChangeRoles(worker=NodeRef(NodeId("w"), 9), roles=BOTH)
        assert isinstance(keeper.change(other), Failure)
        assert isinstance(
            keeper.change(ChangeRoles(worker=node.ref, roles=())), Failure
        )
        for role in (Role.PREFILL, Role.DECODE):
            only = ChangeRoles(worker=node.ref, roles=(role,))
            assert keeper.change(only) == Ack()
        assert (prefill.taking, decode.taking) == (False, True)
        assert node.roles == (Role.DECODE,)
        async with TaskScope() as tasks, asyncio.timeout(20):
            tasks.spawn(keeper.watch(), name="roles")
            prefill.idle = True
            while keeper.draining:  # noqa: ASYNC110 - what the keeper's task changes
                await asyncio.sleep(0.005)
            back = ChangeRoles(worker=node.ref, roles=(Role.PREFILL,))
            assert keeper.change(back) == Ack()
            assert (node.roles, prefill.taking) == ((), False), "decode drains first"
            decode.idle = True
            while not prefill.taking:  # noqa: ASYNC110 - what the keeper's task changes
                await asyncio.sleep(0.005)
        assert node.roles == (Role.PREFILL,)
    await hub.close()
