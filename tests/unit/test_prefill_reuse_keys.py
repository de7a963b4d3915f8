"""Only a copy with the request's own key is loaded; any other is a miss."""

import pytest
from msgspec import structs
from tests.unit.prefill_world import BLOCK, Shell, ref, slot, work

from kvtide.bus.messages import HandoverPlan, PrefillDone, PutSlot
from kvtide.kv import BlockKey, Located
from kvtide.prefill import events

FOREIGN = Located(BlockKey(b"X" * 16), slot(77), 5)


def loading(shell: Shell) -> events.Load:
    (load,) = shell.loads
    assert load.ref == ref("a")
    return load


def finished(shell: Shell) -> tuple[int, int]:
    (done,) = shell.of(PrefillDone)
    assert isinstance(done, PrefillDone)
    return done.reused_tokens, done.computed_tokens


@pytest.mark.parametrize("block", [1, 3])
def test_the_reused_prefix_ends_at_a_foreign_descriptor(block: int) -> None:
    shell = Shell()
    asked = work("a", 65, reuse=4)
    reuse = list(asked.reuse)
    reuse[block] = FOREIGN
    shell.tell(events.WorkArrived(structs.replace(asked, reuse=tuple(reuse))))
    assert loading(shell).copies == asked.reuse[:block]
    shell.run()
    assert finished(shell) == (block * BLOCK, 64 - block * BLOCK)


def test_swapped_descriptors_are_never_loaded_but_computed() -> None:
    shell = Shell()
    asked = work("a", 65, reuse=4)
    first, second, *rest = asked.reuse
    swapped = structs.replace(asked, reuse=(second, first, *rest))
    shell.tell(events.WorkArrived(swapped))
    assert isinstance(shell.under_way[ref("a")], events.Begin)
    shell.run()
    assert finished(shell) == (0, 64)


def test_a_copy_for_the_block_that_has_no_key_is_never_loaded() -> None:
    shell = Shell()
    asked = work("a", 40, reuse=2)
    reuse = (*asked.reuse, FOREIGN)
    shell.tell(events.WorkArrived(structs.replace(asked, reuse=reuse)))
    assert loading(shell).copies == asked.reuse
    shell.run()
    assert finished(shell) == (32, 7)


def test_what_the_store_calls_existing_must_have_the_key_that_was_asked_for() -> None:
    shell = Shell()
    asked = work("a", 65)
    shell.tell(events.WorkArrived(asked))
    own = [Located(key, slot(70 + i), i) for i, key in enumerate(asked.keys)]
    begun = shell.under_way.pop(ref("a"))
    assert isinstance(begun, events.Begin)
    answers = (PutSlot(None, own[0]), PutSlot(slot(1)), PutSlot(None, own[3]))
    shell.tell(events.SlotsGranted(ref("a"), (*answers, PutSlot(slot(3)))))
    assert loading(shell).copies == (own[0],)
    shell.run()
    (plan,) = shell.of(HandoverPlan)
    assert isinstance(plan, HandoverPlan)
    assert [copy.located for copy in plan.copies] == [own[0]]
    assert [one.block for one in plan.slots] == [1]
    assert finished(shell) == (BLOCK, BLOCK)
