"""The decode machine's answers: stops, pages of tokens, blocks for the next turn."""

import pytest
from tests.unit.decode_world import (
    EOS,
    LAYERS,
    PREFILL,
    World,
    ack,
    parts,
    plan,
    pull,
    ref,
    work,
)

from kvtide.bus.messages import (
    FinishReason,
    PullState,
)
from kvtide.decode import events
from kvtide.decode.limits import DecodeLimits


def test_eos_ends_the_answer_and_is_not_sent() -> None:
    world = World()
    world.tell(events.WorkArrived(work("a", 5, prefill=None)))
    world.run_step()
    world.run_step(token=EOS)
    assert world.tokens[ref("a")] == [7]
    assert world.events[-1].finish is FinishReason.STOP
    assert world.opened == {}


def test_eos_is_banned_before_the_least_length_and_ignored_if_asked() -> None:
    world = World()
    world.tell(events.WorkArrived(work("a", 5, prefill=None, min_new_tokens=1)))
    assert world.step is not None
    assert world.step.rows[0].banned == (EOS,)
    world.run_step()
    assert world.step.rows[0].banned == ()
    world = World()
    world.tell(events.WorkArrived(work("a", 5, prefill=None, ignore_eos=True)))
    world.run_step(token=EOS)
    assert world.tokens[ref("a")] == [EOS]


def test_a_later_attempt_goes_on_where_the_answer_stopped() -> None:
    world = World()
    job = work("a", 20, prompt_tokens=18, attempt=2, prefill=None)
    world.tell(events.WorkArrived(job))
    world.run()
    assert [event.index for event in world.events] == [2, 3]
    assert world.events[-1].finish is FinishReason.LENGTH


def test_an_answer_that_is_complete_already_only_ends() -> None:
    world = World()
    job = work("a", 22, prompt_tokens=18, attempt=2, prefill=None)
    world.tell(events.WorkArrived(job))
    assert [(event.index, event.ids, event.finish) for event in world.events] == [
        (4, (), FinishReason.LENGTH)
    ]
    assert world.opened == {}


def test_pages_hold_every_token_from_any_index_until_acknowledged() -> None:
    world = World()
    assert pull(world, "a", 0).state is PullState.UNKNOWN
    world.tell(events.WorkArrived(work("a", 5)))
    assert pull(world, "a", 0).state is PullState.WAITING
    world.tell(events.MemberGone(PREFILL))
    world.run_step()
    page = pull(world, "a", 0)
    assert (page.ids, page.state, page.finish) == ((7,), PullState.RUNNING, None)
    world.run()
    page = pull(world, "a", 1)
    assert (page.index, page.ids, page.state) == (1, (7, 7, 7), PullState.FINISHED)
    assert page.finish is FinishReason.LENGTH
    world.tell(ack("a", 4, finished=False))
    assert pull(world, "a", 4).state is PullState.FINISHED
    world.tell(ack("a", 4))
    assert pull(world, "a", 4).state is PullState.UNKNOWN


def test_a_sequence_pauses_when_nobody_acknowledges() -> None:
    world = World(DecodeLimits(unacked_tokens=2))
    job = work("a", 5, prefill=None, max_new_tokens=8)
    world.tell(events.WorkArrived(job))
    world.run()
    assert world.tokens[ref("a")] == [7, 7]
    world.tell(ack("a", 2, finished=False))
    world.run()
    assert world.tokens[ref("a")] == [7] * 4


def test_generated_blocks_are_put_with_chained_keys() -> None:
    world = World()
    job = work("a", 20, prefill=PREFILL, max_new_tokens=30)
    world.tell(events.WorkArrived(job))
    planned = plan("a", 20)
    world.say(planned)
    for layer in range(LAYERS):
        world.say(parts(planned, layer, layer))
    world.run()
    # block 0 is prefill's; 1 has the prompt's rest; 2 is generated, 3 never fills
    put = world.put_blocks[ref("a")]
    assert [one.block for one in put] == [1, 2]
    first = job.keys[0] + bytes([16])
    assert [one.key for one in put] == [first, first + bytes([7])]


def test_locally_computed_blocks_are_put_and_pooled_ones_are_not() -> None:
    world = World()
    world.tell(events.WorkArrived(work("a", 64, reuse=1, prefill=None)))
    world.run()
    assert [one.block for one in world.put_blocks[ref("a")]] == [1, 2, 3]


@pytest.mark.parametrize("acked_early", [False, True])
def test_a_last_token_that_completes_a_block_is_fed_for_the_next_turn(
    acked_early: bool,
) -> None:
    world = World()
    world.tell(events.WorkArrived(work("a", 13, prefill=None, max_new_tokens=3)))
    for _ in range(3):
        world.run_step()
    assert world.ends[ref("a")] == 1
    assert world.step is not None
    assert world.step.rows[0].sampling is None
    if acked_early:
        world.tell(ack("a", 3))
    assert pull(world, "a", 0).state is PullState.FINISHED
    world.run()
    assert [one.block for one in world.put_blocks[ref("a")]] == [0]
    assert world.opened == {}
    if not acked_early:
        world.tell(ack("a", 3))
    assert world.machine.idle
    assert world.ends[ref("a")] == 1


def test_a_failure_while_closing_is_none_to_the_client() -> None:
    world = World()
    world.tell(events.WorkArrived(work("a", 13, prefill=None, max_new_tokens=3)))
    for _ in range(3):
        world.run_step()
    world.run_step(fail=True)
    assert world.failed == []
    assert world.opened == {}


def test_blocks_of_an_acknowledged_answer_are_still_put() -> None:
    world = World(DecodeLimits(put_blocks=1))
    world.tell(events.WorkArrived(work("a", 65, prefill=None, max_new_tokens=1)))
    while world.step is not None:
        world.run_step()
    world.tell(ack("a", 1))
    world.run()
    assert [one.block for one in world.put_blocks[ref("a")]] == [0, 1, 2, 3]
    assert world.machine.idle
