"""The fleet's columns are what beats and bookings say, and never below zero."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings, strategies as st
from tests.unit.conductor_cluster import GATEWAY, beat, ref

from kvtide.bus.messages import Beat, DecodeLoad, PrefillLoad, StepSample
from kvtide.conductor.limits import ConductorLimits
from kvtide.conductor.reducers.bookings import Booking, Bookings
from kvtide.conductor.reducers.costs import Costs
from kvtide.conductor.reducers.fleet import FleetTable
from kvtide.conductor.reducers.membership import Membership
from kvtide.kv import NodeId, RequestId, Role
from kvtide.policy.class_costs import CONFIDENT
from kvtide.policy.forecast import Coming

NAMES = [f"w{number}" for number in range(5)]


@dataclass
class Told:
    kind: str
    name: str
    host: str
    amount: int


told = st.builds(
    Told,
    kind=st.sampled_from(["prefill", "decode", "gone", "book", "end", "tick"]),
    name=st.sampled_from(NAMES),
    host=st.sampled_from(["", "a", "b", "c"]),
    amount=st.integers(-5, 10_000),
)


class World:
    def __init__(self) -> None:
        self.bookings = Bookings(ConductorLimits())
        self.members = Membership()
        self.fleet = FleetTable(self.bookings, Costs())
        self.now_s = 100.0
        self.made = 0

    def see(self, seen: Beat) -> None:
        self.members.seen(seen)
        self.fleet.seen(seen)
        self.bookings.reported(seen.node.node, self.now_s)

    def take(self, what: Told) -> None:
        name = what.name
        match what.kind:
            case "prefill":
                load = PrefillLoad(queued_tokens=what.amount, tokens_per_s=500.0)
                self.see(beat(name, Role.PREFILL, host=what.host, load=load))
            case "decode":
                load = DecodeLoad(
                    running=what.amount,
                    kv_tokens_used=what.amount,
                    fill_tokens=what.amount,
                )
                self.see(beat(name, Role.DECODE, host=what.host, load=load))
            case "gone":
                if self.members.gone(ref(name)) is not None:
                    self.fleet.gone(NodeId(name))
            case "book":
                self.made += 1
                self.book(name, what.amount)
            case "end":
                self.bookings.end(RequestId(f"r{self.made}"), self.now_s)
            case _:
                self.now_s += 1.0
                self.bookings.tick(self.now_s)

    def book(self, name: str, amount: int) -> None:
        booking = Booking(
            request=RequestId(f"r{self.made}"),
            attempt=0,
            conductor=ref("c"),
            gateway=GATEWAY,
            prefill=NodeId(name),
            decode=NodeId(name),
            prefill_ms=max(0, amount),
            reserved_tokens=max(0, amount),
            at_s=self.now_s,
            fill_tokens=amount % 100,
        )
        self.bookings.book(booking)


@settings(deadline=None, max_examples=60)
@given(st.lists(told, max_size=40))
def test_columns_are_what_beats_and_bookings_say(story: list[Told]) -> None:
    world = World()
    for what in story:
        world.take(what)
    line = world.members.line("demo")
    if line is None:
        return
    rows = world.fleet.rows("demo", line, ())
    prefills = world.fleet.prefills(rows, np.zeros(len(rows.prefills)))
    none = np.zeros(len(rows.decodes))
    decodes = world.fleet.decodes(rows, Coming(none, none))
    assert [each.node for each in prefills.refs] == list(line.prefills)
    assert [each.node for each in decodes.refs] == list(line.decodes)
    for at, node in enumerate(line.prefills):
        said = world.members.get(node)
        assert said is not None
        (load,) = said.load
        assert isinstance(load, PrefillLoad)
        assert prefills.waiting_ms[at] == world.bookings.prefill_ms(node) >= 0
        assert prefills.waiting_tokens[at] == max(0, load.queued_tokens)
        assert prefills.token_ms[at] == 2.0
        assert prefills.host[at] == world.fleet.host_number(said.host)
    for at, node in enumerate(line.decodes):
        said = world.members.get(node)
        assert said is not None
        (load,) = said.load
        assert isinstance(load, DecodeLoad)
        used = max(0, load.kv_tokens_used) + world.bookings.decode_tokens(node)
        assert decodes.kv_tokens[at] == used
        assert decodes.running[at] == max(0, load.running)
        fills = max(0, load.fill_tokens) + world.bookings.fill_tokens(node)
        assert decodes.fill_tokens[at] == fills
        assert decodes.ahead[at] == world.bookings.decode_requests(node) >= 0
    hosts = {
        world.members.get(NodeId(name)).host  # pyright: ignore[reportOptionalMemberAccess]
        for name in NAMES
        if world.members.get(NodeId(name)) is not None
    }
    numbers = {world.fleet.host_number(host) for host in hosts if host}
    assert len(numbers) == len(hosts - {""})
    assert all(0 < number < world.fleet.hosts for number in numbers)


def test_a_fit_comes_before_a_workers_own_rate() -> None:
    costs = Costs()
    load = PrefillLoad(tokens_per_s=9999.0)
    seen = beat("p1", Role.PREFILL, load=load)
    assert costs.of_prefill(seen, load)[0].token_ms < 0.2
    for number in range(CONFIDENT):
        new = 100 * (number + 1)
        step = StepSample(1, new, 0.0, 10.0 + new * 0.5)
        sample = PrefillLoad(tokens_per_s=9999.0, step=step)
        seen = beat("p1", Role.PREFILL, load=sample)
        costs.seen(seen, None)
        # the same step again is no new sample
        costs.seen(seen, seen)
    assert costs.known().samples == CONFIDENT
    curve, _ = costs.of_prefill(seen, load)
    assert curve.ms(1000, 0) > 400
    assert costs.profiles()["p1"].prefill == curve
