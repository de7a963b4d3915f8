"""Memory that runs out: the youngest begins again later, with the same tokens."""

import pytest
from hypothesis import given, settings, strategies as st
from msgspec import structs
from tests.unit.decode_world import BLOCK, World, ack, ref, work

from kvtide.bus.messages import (
    Cancel,
    DecodeWork,
    FinishReason,
    RefuseCode,
    WorkAccepted,
    WorkRefused,
)
from kvtide.decode import events
from kvtide.decode.limits import DecodeLimits
from kvtide.kv import RequestId

LIMITS = DecodeLimits(waiting=8, batch=8, growth_blocks=0, fill_tokens=16)


def asked(name: str, tokens: int, new: int) -> DecodeWork:
    return work(name, tokens, prefill=None, max_new_tokens=new, ignore_eos=True)


def cancel(name: str) -> events.CancelArrived:
    return events.CancelArrived(Cancel(request=RequestId(name), attempt=1, reason=""))


def test_pages_are_bound_as_tokens_come() -> None:
    world = World(LIMITS, capacity_tokens=12 * BLOCK)
    world.tell(events.WorkArrived(asked("a", 20, 60)))
    assert world.machine.pages.of(ref("a")) == 2
    seen: set[int] = set()
    while world.step is not None or world.puts:
        if world.puts:
            world.end_put(ref("a"))
        else:
            world.run_step()
            seen.add(world.machine.pages.of(ref("a")))
    assert seen >= {2, 3, 4, 5}
    assert len(world.tokens[ref("a")]) == 60


def test_the_youngest_gives_its_memory_up_and_goes_on_later() -> None:
    world = World(LIMITS, capacity_tokens=6 * BLOCK)
    for name in ("a", "b"):
        world.tell(events.WorkArrived(asked(name, 20, 60)))
    world.run()
    assert world.machine.load().preempted > 0
    for name in ("a", "b"):
        assert len(world.tokens[ref(name)]) == 60
        assert world.ends[ref(name)] == 1
    finishes = [one.request for one in world.events if one.finish]
    assert finishes == ["a", "b"], "the oldest is never put off"
    assert world.events[-1].finish is FinishReason.LENGTH
    assert world.opened == {}
    # what it had is in the pool, and was read from there, not computed again
    generated = {block.block for block in world.put_blocks[ref("b")]}
    assert generated >= {1, 2}


def test_a_preempted_one_that_is_cancelled_leaves_nothing() -> None:
    world = World(LIMITS, capacity_tokens=6 * BLOCK)
    for name in ("a", "b"):
        world.tell(events.WorkArrived(asked(name, 20, 60)))
    while not world.machine.load().preempted:
        world.run_step()
    world.tell(cancel("b"))
    world.run()
    assert len(world.tokens[ref("a")]) == 60
    world.tell(ack("a", 60))
    assert (world.opened, world.machine.idle) == ({}, True)


def test_what_never_fits_is_refused_before_any_work() -> None:
    world = World(LIMITS, capacity_tokens=4 * BLOCK)
    world.tell(events.WorkArrived(asked("a", 20, 60)))
    refusal = world.replies[-1]
    assert isinstance(refusal, WorkRefused)
    assert refusal.code is RefuseCode.TOO_LARGE
    assert (world.opened, world.step) == ({}, None)


def test_what_would_break_the_target_of_those_that_run_is_refused() -> None:
    world = World(LIMITS, capacity_tokens=60 * BLOCK)
    strict = structs.replace(asked("a", 2, 200), tbt_ms=42.0)

    def steps(count: int) -> None:
        """Some, of 20 ms and 10 ms for each row."""
        for _ in range(count):
            assert world.step is not None
            world.run_step(ms=20.0 + 10.0 * len(world.step.rows))
            for one in list(world.puts):
                world.end_put(one)

    world.tell(events.WorkArrived(strict))
    steps(10)
    assert world.machine.load().tbt_ms == 42.0
    world.tell(events.WorkArrived(asked("b", 2, 200)))
    assert isinstance(world.replies[-1], WorkAccepted)
    steps(10)  # two rows take 40 ms, three would take 50
    world.tell(events.WorkArrived(asked("c", 2, 200)))
    refusal = world.replies[-1]
    assert isinstance(refusal, WorkRefused)
    assert refusal.code is RefuseCode.BUSY
    assert "target" in refusal.reason
    world.tell(cancel("a"))  # nobody with a target is left
    steps(1)
    world.tell(events.WorkArrived(asked("c", 2, 200)))
    assert isinstance(world.replies[-1], WorkAccepted)


REQUESTS = st.lists(
    st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=6
)
PAGES = st.integers(9, 14)
CHOICES = st.lists(st.integers(0, 9), max_size=60)


@settings(max_examples=40, deadline=None)
@given(REQUESTS, PAGES, CHOICES)
def test_however_memory_runs_out_each_answer_is_whole(
    requests: list[tuple[int, int]], pages: int, choices: list[int]
) -> None:
    check_answers(requests, pages, choices)


@pytest.mark.full
@pytest.mark.timeout(600)
@settings(max_examples=600, deadline=None)
@given(REQUESTS, PAGES, CHOICES)
def test_however_memory_runs_out_each_answer_is_whole_at_length(
    requests: list[tuple[int, int]], pages: int, choices: list[int]
) -> None:
    check_answers(requests, pages, choices)


def check_answers(
    requests: list[tuple[int, int]], pages: int, choices: list[int]
) -> None:
    """``choices`` say what ends next; every row must see its whole past (the world)."""
    world = World(LIMITS, capacity_tokens=pages * BLOCK)
    cancelled: set[str] = set()
    for number, (tokens, new) in enumerate(requests):
        world.tell(events.WorkArrived(asked(f"r{number}", tokens, new)))
    for choice in choices:
        if choice == 0 and world.puts:
            world.end_put(next(iter(world.puts)))
        elif choice == 1 and world.reads:
            world.read_next(missed=1)
        elif choice == 2 and world.finds:
            world.find_next()
        elif choice == 3:
            name = f"r{len(cancelled)}"
            cancelled.add(name)
            world.tell(cancel(name))
        elif world.step is not None:
            world.run_step()
    world.run()
    for number, (_, new) in enumerate(requests):
        name = f"r{number}"
        if name not in cancelled:
            assert len(world.tokens[ref(name)]) == new
            assert world.ends[ref(name)] == 1
            world.tell(ack(name, new))
    assert (world.opened, world.machine.pages.used) == ({}, 0)
    assert world.machine.idle
