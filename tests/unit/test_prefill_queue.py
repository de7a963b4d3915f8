"""The prefill machine: order, exactly one end, and nothing held afterwards."""

import pytest
from hypothesis import given, settings, strategies as st
from msgspec import structs
from tests.unit.prefill_world import (
    BLOCK,
    DECODE,
    GATEWAY,
    LAYERS,
    LIMITS,
    ME,
    Shell,
    made_elsewhere,
    making_elsewhere,
    ref,
    slot,
    work,
)

from kvtide.bus.messages import (
    Ack,
    Cancel,
    Failure,
    HandoverPlan,
    HandoverPull,
    HandoverState,
    HandoverTaken,
    Owned,
    PartsReady,
    PrefillDone,
    PrefillFailed,
    RefuseCode,
    WorkAccepted,
    WorkRefused,
)
from kvtide.kv import (
    Located,
    NodeRef,
    RequestId,
    RequestRef,
)
from kvtide.prefill import events
from kvtide.worker.steps import StepShape


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 18, 33, 64, 65, 130])
@pytest.mark.parametrize("reuse", [0, 1, 2, 8])
def test_every_token_but_the_last_is_loaded_or_computed_once(
    tokens: int, reuse: int
) -> None:
    shell = Shell()
    shell.tell(events.WorkArrived(work("a", tokens, reuse=reuse)))
    shell.run()
    (done,) = shell.of(PrefillDone)
    assert isinstance(done, PrefillDone)
    assert done.reused_tokens + done.computed_tokens == tokens - 1
    assert done.reused_tokens == min(min(reuse, tokens // BLOCK) * BLOCK, tokens - 1)
    (plan,) = shell.of(HandoverPlan)
    assert isinstance(plan, HandoverPlan)
    planned = sum(one.tokens for one in plan.slots)
    assert planned == done.computed_tokens
    parts = [
        (one.block, one.layer)
        for ready in shell.of(PartsReady)
        if isinstance(ready, PartsReady)
        for one in ready.parts
    ]
    expected = {(one.block, layer) for one in plan.slots for layer in range(LAYERS)}
    assert set(parts) == expected
    assert len(parts) == len(expected)
    assert done.messages == len(shell.of(PartsReady))
    shell.tell(events.TakenArrived(HandoverTaken(request=RequestId("a"), attempt=1)))
    assert (shell.opened, shell.leased, shell.machine.jobs) == (set(), set(), 0)


def test_a_miss_in_the_reused_prefix_is_computed_and_said_truly() -> None:
    shell = Shell()
    shell.tell(events.WorkArrived(work("a", 50, reuse=3)))
    shell.finish(ref("a"), short=2)
    shell.run()
    (done,) = shell.of(PrefillDone)
    assert isinstance(done, PrefillDone)
    assert (done.reused_tokens, done.computed_tokens) == (16, 33)


@pytest.mark.parametrize("tokens", [65, 70])
def test_what_is_found_when_asking_for_slots_is_loaded_not_computed(
    tokens: int,
) -> None:
    shell = Shell()
    shell.tell(events.WorkArrived(work("a", tokens, reuse=1)))
    shell.finish(ref("a"))
    shell.finish(ref("a"), there=3)
    if tokens == 70:
        (load,) = shell.loads
        assert (load.first, len(load.copies)) == (1, 3)
        assert shell.step is not None, "it is computed beside the load"
        assert [(one.start, one.end) for one in shell.step.chunks] == [(64, 69)]
        assert [one.block for one in shell.step.chunks[0].filled] == [4]
    shell.run()
    (plan,) = shell.of(HandoverPlan)
    assert isinstance(plan, HandoverPlan)
    assert [copy.block for copy in plan.copies] == [1, 2, 3]
    (done,) = shell.of(PrefillDone)
    assert isinstance(done, PrefillDone)
    expected = (64, 5) if tokens == 70 else (64, 0)
    assert (done.reused_tokens, done.computed_tokens) == expected
    assert plan.first_block == done.reused_tokens // BLOCK


def test_a_full_store_ends_the_work_at_the_first_block_without_room() -> None:
    shell = Shell()
    shell.tell(events.WorkArrived(work("a", 65)))
    shell.finish(ref("a"), short=1)
    shell.run()
    (done,) = shell.of(PrefillDone)
    assert isinstance(done, PrefillDone)
    assert done.computed_tokens == 48


def test_no_room_at_all_is_a_failure_before_any_computing() -> None:
    shell = Shell()
    shell.tell(events.WorkArrived(work("a", 65)))
    shell.finish(ref("a"), short=9)
    (failed,) = shell.of(PrefillFailed)
    assert isinstance(failed, PrefillFailed)
    assert failed.code == "no_slots"
    assert shell.step is None
    assert (shell.opened, shell.leased) == (set(), set())


def test_first_come_first_served_in_chunks_shorter_when_shared() -> None:
    shell = Shell()
    shell.tell(events.WorkArrived(work("a", 101)))
    shell.tell(events.WorkArrived(work("b", 31, prefix=50)))
    shell.finish(ref("a"))
    shell.finish(ref("b"))
    first = shell.run_step()
    assert [(one.ref.request, one.start, one.end) for one in first.chunks] == [
        ("a", 0, 64)
    ]
    shell.tell(events.EngineShared(shared=True))
    second = shell.run_step()
    assert [(one.start, one.end) for one in second.chunks] == [(64, 100)]
    third = shell.run_step()
    assert [(one.ref.request, one.start, one.end) for one in third.chunks] == [
        ("b", 0, 16)  # two chunks of whole blocks, rather than 24 and 6
    ]


def test_beside_decode_a_chunk_fits_its_target_with_its_rows() -> None:
    shell = Shell()
    beside = StepShape.of([(9, 10), (19, 20)])
    shell.tell(events.EngineShared(shared=True, target_ms=105.0, beside=beside))
    shell.tell(events.WorkArrived(work("a", 101)))
    shell.finish(ref("a"))
    # 94.5 ms at 300 tokens a second are 28 tokens, two of them decode's
    assert [(one.start, one.end) for one in shell.run_step().chunks] == [(0, 25)]
    shell.run()


def test_short_prompts_share_a_step() -> None:
    shell = Shell()
    for name in "ab":
        shell.tell(events.WorkArrived(work(name, 9)))
    assert len(shell.under_way) == 2
    # the first one ready does not wait for the second
    shell.finish(ref("a"))
    assert shell.step is not None
    assert len(shell.step.chunks) == 1
    shell.finish(ref("b"))
    shell.tell(events.WorkArrived(work("c", 9)))
    shell.finish(ref("c"))
    shell.run_step()
    assert shell.step is not None
    assert [chunk.ref for chunk in shell.step.chunks] == [ref("b"), ref("c")]


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_block_that_another_job_makes_is_waited_for(*, cancelled: bool) -> None:
    shell = Shell()
    shell.tell(events.WorkArrived(work("a", 65)))
    shell.tell(events.WorkArrived(work("b", 65)))
    shell.tell(events.WorkArrived(work("c", 10)))
    assert set(shell.under_way) == {ref("a"), ref("c")}
    shell.finish(ref("a"))
    shell.finish(ref("c"))
    if cancelled:
        cancel = Cancel(request=RequestId("a"), attempt=1, reason="")
        shell.tell(events.CancelArrived(cancel))
        assert isinstance(shell.under_way[ref("b")], events.Begin)
        shell.run_step(events.StepOutcome.ABORTED)
        shell.run()
    else:
        shell.run_step()
        assert ref("b") not in shell.opened
        shell.finish(ref("a"))
        shell.finish(ref("b"), there=4)
        shell.run()
    done = {
        one.request: (one.reused_tokens, one.computed_tokens)
        for one in shell.of(PrefillDone)
        if isinstance(one, PrefillDone)
    }
    assert done[RequestId("b")] == ((0, 64) if cancelled else (64, 0))


def test_cancel_in_a_step_aborts_it_and_frees_when_it_has_ended() -> None:
    shell = Shell()
    shell.tell(events.WorkArrived(work("a", 65)))
    shell.finish(ref("a"))
    cancel = Cancel(request=RequestId("a"), attempt=1, reason="client left")
    shell.tell(events.CancelArrived(cancel))
    assert isinstance(shell.replies[-1], Ack)
    assert shell.leased == {ref("a")}
    shell.run_step(events.StepOutcome.ABORTED)
    assert (shell.opened, shell.leased, shell.machine.jobs) == (set(), set(), 0)
    assert shell.ends[ref("a")] == 0


def test_cancel_before_work_wins() -> None:
    shell = Shell()
    cancel = Cancel(request=RequestId("a"), attempt=1, reason="")
    shell.tell(events.CancelArrived(cancel))
    shell.tell(events.WorkArrived(work("a", 20)))
    refused = shell.replies[-1]
    assert isinstance(refused, WorkRefused)
    assert refused.code is RefuseCode.CANCELLED
    shell.tell(events.WorkArrived(work("a", 20, attempt=2)))
    assert isinstance(shell.replies[-1], WorkAccepted)


def test_a_repeat_is_accepted_again_and_done_once() -> None:
    shell = Shell()
    for _ in range(2):
        shell.tell(events.WorkArrived(work("a", 20)))
        assert isinstance(shell.replies[-1], WorkAccepted)
    shell.run()
    assert shell.ends[ref("a")] == 1


def test_a_newer_attempt_takes_the_older_ones_place() -> None:
    shell = Shell()
    shell.tell(events.WorkArrived(work("a", 20)))
    shell.tell(events.WorkArrived(work("a", 20, attempt=2)))
    shell.run()
    assert (shell.ends[ref("a", 1)], shell.ends[ref("a", 2)]) == (0, 1)
    assert shell.leased == {ref("a", 2)}


def test_full_queue_and_hopeless_deadline_are_refused() -> None:
    shell = Shell()
    for name in "abcdef":
        shell.tell(events.WorkArrived(work(name, 200)))
    assert isinstance(shell.replies[3], WorkAccepted)
    refused = shell.replies[-1]
    assert isinstance(refused, WorkRefused)
    assert refused.code is RefuseCode.BUSY


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (events.Drain(), RefuseCode.DRAINING),
        (events.StoreAttached(attached=False), RefuseCode.NO_STORE),
        (events.ModelLoaded("other", 1000, BLOCK), RefuseCode.UNKNOWN_MODEL),
        (events.ModelLoaded("m", 10, BLOCK), RefuseCode.TOO_LARGE),
        (events.Fenced(NodeRef(ME.node, 2)), RefuseCode.OTHER_LIFE),
    ],
)
def test_unfit_work_is_refused_with_the_reason(
    event: events.Event, code: RefuseCode
) -> None:
    shell = Shell()
    shell.tell(event)
    shell.tell(events.WorkArrived(structs.replace(work("a", 20), worker=ME)))
    refused = shell.replies[-1]
    assert isinstance(refused, WorkRefused)
    assert refused.code is code


def test_pull_tells_all_that_was_said() -> None:
    shell = Shell()
    pull = events.PullArrived(HandoverPull(request=RequestId("a"), attempt=1))
    shell.tell(pull)
    assert isinstance(shell.replies[-1], Failure)
    shell.tell(events.WorkArrived(work("a", 40)))
    shell.run()
    shell.tell(pull)
    state = shell.replies[-1]
    assert isinstance(state, HandoverState)
    assert state.done is not None
    assert state.plan is not None
    assert len(state.parts) == 3 * LAYERS


def test_owner_list_and_gone_nodes_free() -> None:
    for event in (
        events.MemberGone(GATEWAY),
        events.MemberGone(DECODE),
        events.OwnedArrived(Owned(owner=GATEWAY, seq=2, requests=())),
    ):
        shell = Shell()
        shell.tell(events.WorkArrived(work("a", 40)))
        shell.run()
        shell.tell(events.OwnedArrived(Owned(owner=GATEWAY, seq=1, requests=())))
        assert shell.leased == {ref("a")}
        shell.tell(event)
        assert (shell.leased, shell.machine.jobs) == (set(), 0)


def test_a_fence_drops_all_without_a_word() -> None:
    shell = Shell()
    shell.tell(events.WorkArrived(work("a", 65)))
    shell.tell(events.WorkArrived(work("b", 65)))
    shell.finish(ref("a"))
    said = len(shell.said)
    shell.tell(events.Fenced(NodeRef(ME.node, 2)))
    shell.run_step(events.StepOutcome.ABORTED)
    shell.run()
    assert len(shell.said) == said
    assert (shell.opened, shell.machine.jobs) == (set(), 0)
    assert not shell.ends


def test_deadline_fails_once() -> None:
    shell = Shell()
    shell.tell(events.WorkArrived(work("a", 65)))
    shell.now_s = 61
    shell.tell(events.Tick())
    shell.tell(events.Tick())
    shell.run()
    assert shell.ends[ref("a")] == 1
    assert (shell.opened, shell.leased) == (set(), set())


ACTIONS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=80)


@settings(max_examples=100, deadline=None)
@given(ACTIONS)
def test_whatever_happens_each_job_ends_once_and_nothing_stays_held(
    actions: list[tuple[int, int]],
) -> None:
    check_jobs(actions)


@pytest.mark.full
@settings(max_examples=1500, deadline=None)
@given(ACTIONS)
def test_whatever_happens_each_job_ends_once_and_nothing_stays_held_at_length(
    actions: list[tuple[int, int]],
) -> None:
    check_jobs(actions)


def check_jobs(actions: list[tuple[int, int]]) -> None:
    shell = Shell()
    for action, number in actions:
        shell.now_s += 0.5
        name, attempt = "abc"[number % 3], 1 + number // 3
        if action <= 1:
            job = work(name, 1 + number * 13, attempt=attempt, reuse=number % 3)
            shell.tell(events.WorkArrived(job))
        elif action == 2 and shell.loads:
            if number % 2:
                shell.check(short=number // 3)
            else:
                shell.end_load(short=number // 2)
        elif action <= 4 and shell.under_way:
            refs = sorted(shell.under_way, key=lambda one: (one.request, one.attempt))
            shell.finish(
                refs[number % len(refs)], short=max(0, number - 3), there=number % 3
            )
        elif action <= 6 and shell.step is not None:
            shell.run_step(list(events.StepOutcome)[max(0, number - 3)])
        else:
            _disturb(shell, action, number, ref(name, attempt))
        load = shell.machine.load()
        assert load.queued <= LIMITS.queued + LIMITS.prepare_ahead
    shell.run()
    assert all(count == 1 for count in shell.ends.values())
    for node in (GATEWAY, NodeRef(GATEWAY.node, 9)):
        shell.tell(events.MemberGone(node))
    shell.run()
    assert (shell.opened, shell.leased, shell.machine.jobs) == (set(), set(), 0)
    assert shell.told == set()
    assert shell.machine.idle


def _disturb(shell: Shell, action: int, number: int, about: RequestRef) -> None:
    if action == 7:
        cancel = Cancel(request=about.request, attempt=about.attempt, reason="")
        shell.tell(events.CancelArrived(cancel))
    elif action == 8:
        taken = HandoverTaken(request=about.request, attempt=about.attempt)
        shell.tell(events.TakenArrived(taken))
    elif number == 0:
        shell.tell(events.StoreAttached(attached=False))
        shell.tell(events.StoreAttached(attached=True))
    elif number == 1:
        shell.leased = set()  # the store takes them back by itself
        shell.tell(events.Fenced(NodeRef(ME.node, 2 + int(shell.now_s))))
    elif number <= 3:
        keys = work("x", 33).keys
        copies = tuple(Located(key, slot(80), 1) for key in keys[: number - 1])
        said = (making_elsewhere(keys), made_elsewhere(copies, ended=number == 3))
        shell.tell(events.PeerSaid(said[about.attempt % 2]))
    else:
        shell.tell(events.Tick())


def test_what_decode_takes_before_the_step_has_ended_still_goes_to_the_pool() -> None:
    shell = Shell()
    shell.tell(events.WorkArrived(work("a", 50)))
    while shell.step is None:
        shell.finish(ref("a"))
    # decode has pulled the last layer's parts while the step's end is on its way
    shell.tell(events.TakenArrived(HandoverTaken(request=RequestId("a"), attempt=1)))
    shell.run()
    assert shell.ends[ref("a")] == 1
    assert len(shell.of(PrefillDone)) == 1
    assert (shell.opened, shell.leased, shell.machine.jobs) == (set(), set(), 0)
