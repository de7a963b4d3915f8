"""The decode machine: arrival, batching, stops, repeats, exact pages."""

import pytest
from hypothesis import given, settings, strategies as st
from msgspec import structs
from tests.unit.decode_world import (
    BLOCK,
    EOS,
    GATEWAY,
    LAYERS,
    LIMITS,
    ME,
    PREFILL,
    World,
    ack,
    done,
    parts,
    plan,
    pull,
    ref,
    state,
    work,
)

from kvtide.bus.messages import (
    Cancel,
    FinishReason,
    HandoverState,
    Owned,
    PictureWork,
    PrefillFailed,
    PullState,
    RefuseCode,
    TokenAck,
    WorkAccepted,
    WorkRefused,
)
from kvtide.decode import events
from kvtide.kv import NodeRef, RequestId, RequestRef


def refused(world: World) -> RefuseCode:
    reply = world.replies[-1]
    assert isinstance(reply, WorkRefused)
    return reply.code


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 18, 33, 64, 65])
def test_handed_over_prompt_runs_to_its_length(tokens: int) -> None:
    world = World()
    world.tell(events.WorkArrived(work("a", tokens)))
    planned = plan("a", tokens)
    world.say(planned)
    for layer in range(LAYERS):
        world.say(parts(planned, layer, layer))
    world.say(done(planned))
    world.run()
    assert world.tokens[ref("a")] == [7] * 4
    assert world.events[0].reused_tokens == 0
    assert world.events[-1].finish is FinishReason.LENGTH
    assert [one.prefill for one in world.told[:1]] == [PREFILL]
    assert world.opened == {}
    world.tell(ack("a", 4))
    assert world.machine.idle


@pytest.mark.parametrize("reuse", [1, 2, 4])
@pytest.mark.parametrize("missed", [0, 1, 9])
def test_reused_prefix_is_pulled_and_what_misses_is_computed(
    reuse: int, missed: int
) -> None:
    world = World()
    world.tell(events.WorkArrived(work("a", 65, reuse=reuse, prefill=None)))
    world.read_next(missed=missed)
    world.run()
    assert world.tokens[ref("a")] == [7] * 4
    assert world.events[0].reused_tokens == max(0, reuse - missed) * BLOCK


def test_all_in_the_pool_runs_without_computing_the_prompt() -> None:
    world = World()
    world.tell(events.WorkArrived(work("a", 64, reuse=4, prefill=None)))
    world.read_next()
    assert world.step is not None
    assert [(row.start, len(row.tokens)) for row in world.step.rows] == [(63, 1)]
    world.run()
    assert world.events[0].reused_tokens == 63


def test_words_that_overtake_their_work_are_kept() -> None:
    world = World()
    planned = plan("a", 33)
    world.say(planned)
    world.say(parts(planned, 0, 0))
    world.tell(events.WorkArrived(work("a", 33)))
    world.read_next()
    world.say(parts(planned, 1, 1))
    world.read_next()
    assert world.step is not None
    assert world.step.rows[0].start == 32


def test_lost_words_are_asked_for() -> None:
    world = World()
    planned = plan("a", 33)
    world.tell(events.WorkArrived(work("a", 33)))
    world.say(parts(planned, 0, 0))
    world.say(done(planned))
    assert len(world.asks) == 1  # the plan and a message are missing: no need to wait
    world.tell(events.HandoverAnswered(ref("a"), state(planned)))
    world.run()
    assert world.events[0].reused_tokens == 0
    assert world.tokens[ref("a")] == [7] * 4


def test_silence_is_asked_into_and_a_dumb_prefill_is_given_up() -> None:
    world = World()
    world.tell(events.WorkArrived(work("a", 33)))
    for _ in range(LIMITS.asks):
        assert world.step is None
        world.now_s += 0.4
        world.tell(events.Tick())
        assert world.asks == []
        world.now_s += 0.2
        world.tell(events.Tick())
        world.tell(events.HandoverAnswered(world.asks.pop().ref, None))
    assert world.step is not None
    world.run()
    assert world.tokens[ref("a")] == [7] * 4


@pytest.mark.parametrize(
    "end",
    [
        events.MemberGone(PREFILL),
        events.HandoverSaid(
            PrefillFailed(
                request=RequestId("a"), attempt=1, prefill=PREFILL, code="", reason=""
            )
        ),
    ],
)
def test_when_prefill_ends_early_only_what_misses_is_computed(
    end: events.Event,
) -> None:
    world = World()
    world.tell(events.WorkArrived(work("a", 65)))
    planned = plan("a", 65)
    world.say(planned)
    world.say(parts(planned, 0, 0))
    world.read_next()
    whole_first = parts(planned, 1, 1)
    world.say(
        type(whole_first)(
            request=whole_first.request,
            attempt=1,
            prefill=PREFILL,
            seq=1,
            parts=whole_first.parts[:1],
        )
    )
    world.read_next()
    world.tell(end)
    step = world.run_step()
    assert [(row.start, len(row.tokens)) for row in step.rows] == [(16, 32)]
    world.run()
    assert world.tokens[ref("a")] == [7] * 4


def test_a_part_that_does_not_verify_makes_its_whole_block_computed() -> None:
    world = World()
    world.tell(events.WorkArrived(work("a", 49)))
    planned = plan("a", 49)
    world.say(planned)
    world.say(parts(planned, 0, 0))
    world.say(parts(planned, 1, 1))
    world.say(done(planned))
    world.read_next(missed=1)
    world.read_next()
    step = world.run_step()
    # the last missing block takes the prompt's last token along, and draws
    assert [(row.start, len(row.tokens)) for row in step.rows] == [(32, 17)]
    assert world.tokens[ref("a")] == [7]


def test_another_life_of_prefill_is_not_heard() -> None:
    world = World()
    world.tell(events.WorkArrived(work("a", 17)))
    planned = plan("a", 17)
    world.say(planned)
    world.say(parts(planned, 0, 0, prefill=NodeRef(PREFILL.node, 0)))
    assert world.reads == []


def test_sequences_share_steps_and_memory_is_bound_in_order() -> None:
    world = World()
    for name, tokens in (("a", 60), ("b", 60), ("c", 60), ("d", 10)):
        world.tell(events.WorkArrived(work(name, tokens, prefill=None)))
    assert set(world.opened) == {ref("a"), ref("b"), ref("c")}
    world.run()
    assert all(world.tokens[ref(name)] == [7] * 4 for name in "abcd")
    assert world.opened == {}


def test_a_fill_is_small_beside_a_running_sequence() -> None:
    world = World()
    world.tell(events.WorkArrived(work("a", 16, prefill=None)))
    world.run_step()
    world.tell(events.WorkArrived(work("b", 60, prefill=None)))
    world.run_step()
    assert world.step is not None
    assert [(row.ref.request, len(row.tokens)) for row in world.step.rows] == [
        ("a", 1),
        ("b", 16),
    ]


def test_short_fills_share_a_step() -> None:
    world = World()
    for name, tokens in (("a", 9), ("b", 5), ("c", 6)):
        world.tell(events.WorkArrived(work(name, tokens, prefill=None)))
    assert world.machine.load().fill_tokens == 8 + 4 + 5
    world.run_step()
    assert world.step is not None
    rows = [(row.ref.request, len(row.tokens)) for row in world.step.rows]
    assert rows == [("a", 1), ("b", 5), ("c", 6)]
    world.run()
    assert world.machine.load().fill_tokens == 0
    assert all(world.tokens[ref(name)] == [7] * 4 for name in "abc")


def test_what_waits_with_copies_is_no_prompt_to_compute() -> None:
    world = World(capacity_tokens=5 * BLOCK)
    for name in ("a", "b"):
        asked = work(name, 4 * BLOCK + 2, reuse=4, prefill=None)
        world.tell(events.WorkArrived(asked))
    load = world.machine.load()
    assert load.kv_tokens_promised > 0, "one waits"
    assert load.fill_tokens == 1 + 1


ADDRESSED = structs.replace(work("a", 5), worker=ME)


@pytest.mark.parametrize(
    ("event", "job", "code"),
    [
        (events.Drain(), work("a", 5), RefuseCode.DRAINING),
        (events.Fenced(NodeRef(ME.node, 2)), ADDRESSED, RefuseCode.OTHER_LIFE),
        (events.Tick(), work("a", 200), RefuseCode.TOO_LARGE),
        (events.Tick(), work("a", 150, max_new_tokens=60), RefuseCode.TOO_LARGE),
        (events.Tick(), PictureWork.of(work("a", 9), (b"x",)), RefuseCode.UNSUPPORTED),
        (
            events.ModelLoaded("n", 200, BLOCK, LAYERS, (), 99),
            work("a", 5),
            RefuseCode.UNKNOWN_MODEL,
        ),
    ],
)
def test_unfit_work_is_refused_with_the_reason(
    event: events.Event, job: object, code: RefuseCode
) -> None:
    world = World()
    world.tell(event)
    world.tell(events.WorkArrived(job))  # pyright: ignore[reportArgumentType]
    assert refused(world) is code
    assert world.machine.idle


def test_a_full_queue_is_busy_and_a_repeat_is_accepted_again() -> None:
    world = World()
    for number in range(8):
        world.tell(events.WorkArrived(work(str(number), 60)))
    assert refused(world) is RefuseCode.BUSY
    world.tell(events.WorkArrived(work("0", 60)))
    assert isinstance(world.replies[-1], WorkAccepted)
    assert world.machine.requests == 7


def test_cancel_frees_when_the_step_has_ended_and_beats_late_work() -> None:
    world = World()
    world.tell(events.WorkArrived(work("a", 5, prefill=None)))
    cancel = Cancel(request=RequestId("a"), attempt=1, reason="")
    world.tell(events.CancelArrived(cancel))
    assert set(world.opened) == {ref("a")}
    world.run_step()
    assert world.machine.idle
    assert world.events == []
    world.tell(events.WorkArrived(work("a", 5, prefill=None)))
    assert refused(world) is RefuseCode.CANCELLED


def test_a_failed_step_fails_each_row_once() -> None:
    world = World()
    for name in "ab":
        world.tell(events.WorkArrived(work(name, 5, prefill=None)))
    world.run_step()
    world.run_step(fail=True)
    assert sorted(one.request for one in world.failed) == ["a", "b"]
    assert pull(world, "a", 0).state is PullState.FAILED
    assert world.opened == {}


def test_no_token_before_the_deadline_is_a_failure() -> None:
    world = World()
    world.tell(events.WorkArrived(work("a", 5)))
    world.now_s = 61
    world.tell(events.Tick())
    assert [one.code for one in world.failed] == ["deadline"]


def test_taken_is_said_until_it_is_heard() -> None:
    world = World()
    world.tell(events.WorkArrived(work("a", 1)))
    assert len(world.told) == 1
    world.tell(events.TakenAnswered(ref("a"), acked=False))
    world.now_s += 2
    world.tell(events.Tick())
    world.tell(events.Tick())
    assert len(world.told) == 2
    world.tell(events.TakenAnswered(ref("a"), acked=True))
    world.now_s += 2
    world.tell(events.Tick())
    assert len(world.told) == 2


ACTIONS = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 5)), max_size=90)


@settings(max_examples=100, deadline=None)
@given(ACTIONS)
def test_whatever_happens_pages_are_exact_and_each_request_ends_once(
    actions: list[tuple[int, int]],
) -> None:
    check_pages(actions)


@pytest.mark.full
@settings(max_examples=1500, deadline=None)
@given(ACTIONS)
def test_whatever_happens_pages_are_exact_and_each_request_ends_once_at_length(
    actions: list[tuple[int, int]],
) -> None:
    check_pages(actions)


def check_pages(actions: list[tuple[int, int]]) -> None:
    world = World()
    for action, number in actions:
        world.now_s += 0.3
        name, attempt = "abc"[number % 3], 1 + number // 3
        if action <= 1:
            prefill = PREFILL if number % 2 else None
            job = work(
                name,
                1 + number * 13,
                attempt=attempt,
                reuse=number % 3,
                prefill=prefill,
            )
            world.tell(events.WorkArrived(job))
        elif action <= 3:
            _hand_over(world, number, name, 1 + number * 13, attempt)
        elif action == 4 and world.reads:
            world.read_next(missed=max(0, number - 2))
        elif action <= 6 and world.step is not None:
            world.run_step(token=EOS if number == 0 else None, fail=number == 5)
        elif action == 7 and world.puts:
            world.end_put(next(iter(world.puts)))
        else:
            _disturb(world, action, number, ref(name, attempt))
    world.run()
    assert all(count <= 1 for count in world.ends.values())
    world.tell(events.MemberGone(PREFILL))
    world.run()
    world.tell(events.MemberGone(NodeRef(GATEWAY.node, 9)))
    world.run()
    assert world.opened == {}
    assert world.machine.idle
    assert world.machine.pages.used == 0


def _hand_over(world: World, number: int, name: str, tokens: int, attempt: int) -> None:
    planned = plan(name, tokens, first=min(number % 3, 1), attempt=attempt)
    match number % 4:
        case 0:
            world.say(planned)
        case 1:
            world.say(parts(planned, 0, 0))
        case 2:
            world.say(parts(planned, 1, 1))
        case _:
            answer: HandoverState | None = state(planned) if number > 3 else None
            if world.asks:
                world.tell(events.HandoverAnswered(world.asks.pop().ref, None))
            world.tell(events.HandoverAnswered(ref(name, attempt), answer))


def _disturb(world: World, action: int, number: int, about: RequestRef) -> None:
    if action <= 8:
        cancel = Cancel(request=about.request, attempt=about.attempt, reason="")
        world.tell(events.CancelArrived(cancel))
    elif action == 9:
        said = TokenAck(
            request=about.request,
            attempt=about.attempt,
            choice=0,
            index=number,
            finished=number > 3,
        )
        world.tell(events.AckArrived(said))
    elif number == 0:
        world.tell(events.Fenced(NodeRef(ME.node, 2 + int(world.now_s))))
    elif number == 1:
        owned = Owned(owner=GATEWAY, seq=int(world.now_s * 10), requests=(about,))
        world.tell(events.OwnedArrived(owned))
    elif number == 2:
        world.tell(events.MemberGone(PREFILL))
    else:
        world.now_s += number
        world.tell(events.Tick())
