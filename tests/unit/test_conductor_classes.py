"""What is learnt of one worker of a class is thought of all of them at once."""

import msgspec
from tests.unit.conductor_cluster import admit, beat, ref
from tests.unit.test_conductor_dispatcher import World

from kvtide.bus.messages import PrefillLoad, StepSample
from kvtide.conductor.commands import RecordDecision
from kvtide.conductor.dispatcher import Dispatcher
from kvtide.conductor.events import MemberSeen
from kvtide.kv import Role
from kvtide.policy.class_costs import CONFIDENT


def test_one_that_was_asked_nothing_is_thought_as_quick_as_its_class() -> None:
    made = World(Dispatcher(ref("c1")))
    for name, role in (("p1", Role.PREFILL), ("p2", Role.PREFILL), ("d1", Role.DECODE)):
        said = msgspec.structs.replace(beat(name, role), worker_class="slow")
        made.handle(MemberSeen(said))
    for number in range(1, CONFIDENT + 1):
        step = StepSample(1, 100 * number, 0.0, 500.0 * number)
        said = beat("p1", Role.PREFILL, seq=number + 1, load=PrefillLoad(step=step))
        named = msgspec.structs.replace(said, worker_class="slow", steps=number)
        made.handle(MemberSeen(named))
    _, commands = made.ask(admit(tokens=1000, chain=()))
    (costs,) = (one.candidates for one in commands if isinstance(one, RecordDecision))
    assert {cost.prefill for cost in costs} == {"p1", "p2"}
    assert all(cost.prefill_ms > 4000 for cost in costs), costs
