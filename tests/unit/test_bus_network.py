"""The faults of a network: seeded, bounded, and in order unless told otherwise."""

import pytest
from hypothesis import given, settings, strategies as st

from kvtide.bus import FaultyNetwork, NetworkFaults, PerfectNetwork
from kvtide.bus.network import Packet
from kvtide.kv import NodeId

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def packet(source: NodeId = A, target: NodeId = B) -> Packet:
    return Packet(source, target, "s", 10)


def test_a_perfect_one_delivers_at_once() -> None:
    assert PerfectNetwork().plan(packet(), 0.0) == (0.0,)
    assert FaultyNetwork(1).plan(packet(), 0.0) == (0.0,)


@given(
    seed=st.integers(),
    loss=st.floats(0, 1),
    duplicate=st.floats(0, 1),
    reorder=st.booleans(),
)
@settings(deadline=None)
def test_the_same_seed_makes_the_same_faults_within_bounds(
    seed: int, loss: float, duplicate: float, reorder: bool
) -> None:
    faults = NetworkFaults(loss, duplicate, 0.1, 0.5, reorder)
    one, other = FaultyNetwork(seed, faults), FaultyNetwork(seed, faults)
    arrivals: list[float] = []
    for index in range(100):
        now_s = index * 0.01
        plan = one.plan(packet(), now_s)
        assert plan == other.plan(packet(), now_s)
        assert all(delay_s + 1e-9 >= 0.1 and delay_s <= 2.0 for delay_s in plan)
        arrivals += [now_s + delay_s for delay_s in plan]
    if not reorder:
        assert arrivals == sorted(arrivals)


@pytest.mark.parametrize(("loss", "arrived"), [(0.0, 1000), (1.0, 0)])
def test_loss_is_what_it_says(loss: float, arrived: int) -> None:
    network = FaultyNetwork(1, NetworkFaults(loss=loss))
    plans = [network.plan(packet(), 0.0) for _ in range(1000)]
    assert sum(len(plan) for plan in plans) == arrived
    assert network.lost == 1000 - arrived


def test_a_cut_is_between_two_sides_and_heals() -> None:
    network = FaultyNetwork(1)
    network.cut([A], [B])
    assert network.plan(packet(A, B), 0.0) == ()
    assert network.plan(packet(B, A), 0.0) == ()
    assert network.plan(packet(A, C), 0.0) == (0.0,)
    network.heal()
    assert network.plan(packet(A, B), 1.0) == (0.0,)
