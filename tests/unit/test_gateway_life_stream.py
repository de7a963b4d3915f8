"""The life of a request: its tokens, cancels and end."""

import pytest
from tests.unit.gateway_story import D1, P1, R, Story, kinds, make_spec, the

from kvtide.bus.messages import (
    FinishReason,
    Outcome,
    PrefillFailed,
    PullState,
)
from kvtide.gateway.life import (
    Aborted,
    CancelAcked,
    ClientGone,
    Emit,
    Fail,
    FailureKind,
    Finish,
    NodeGone,
    RecordEnded,
    SendAdmit,
    SendCancel,
    SendTokenAck,
    SendTokenPull,
    Stage,
    Submitted,
    Tick,
    Usage,
    WorkerSaid,
)
from kvtide.kv import (
    NodeId,
    NodeRef,
    RequestRef,
    TenantId,
    rendezvous_order,
)


@pytest.mark.parametrize("early", [True, False])
def test_a_prefill_that_fails_is_left_to_decode(early: bool) -> None:
    story = Story()
    story.run()
    failed = PrefillFailed(request=R, attempt=1, prefill=P1, code="no_slots", reason="")
    if early:
        assert story.tell(WorkerSaid(P1, failed)) == []
    else:
        assert story.tell(NodeGone(P1)) == []
    story.tokens(0, [1], FinishReason.STOP)
    assert the(Finish, story.said).reason is FinishReason.STOP


def test_a_prefill_lost_before_it_answered_starts_again() -> None:
    story = Story()
    story.tell(Submitted())
    story.place()
    assert the(SendAdmit, story.tell(NodeGone(P1))).message.attempt == 2


def test_repeats_and_stale_events_change_nothing() -> None:
    story = Story()
    story.run()
    story.tokens(0, [1, 2])
    assert story.tokens(0, [1, 2]) == []
    assert story.ids == [1, 2]
    story.tokens(1, [2, 3])
    assert story.ids == [1, 2, 3]
    assert story.tokens(2, [3], attempt=7) == []
    assert story.tokens(3, [4], decode=NodeRef(D1.node, 9)) == []


def test_a_gap_pulls_at_once_and_once() -> None:
    story = Story()
    story.run()
    pull = the(SendTokenPull, story.tokens(2, [3]))
    assert (pull.worker, pull.message.index) == (D1, 0)
    assert story.tokens(3, [4]) == []
    commands = story.page(PullState.RUNNING, 0, [1, 2, 3, 4])
    assert story.ids == [1, 2, 3, 4]
    assert kinds(commands) == [Emit]


def test_silence_pulls_and_a_finish_can_come_with_the_page() -> None:
    story = Story()
    story.run()
    story.tokens(0, [1])
    commands = story.tell(Tick(), after_s=1)
    assert kinds(commands) == [SendTokenAck, SendTokenPull]
    assert story.life.wake_s == pytest.approx(story.now_s + 0.25)
    last = story.page(PullState.FINISHED, 1, [2], FinishReason.STOP)
    assert the(Finish, last).reason is FinishReason.STOP


def test_waiting_pages_keep_it_alive_and_silence_ends_it() -> None:
    story = Story()
    story.run()
    for _ in range(30):
        assert the(SendTokenPull, story.tell(Tick(), after_s=1))
        assert story.page(PullState.WAITING) == []
    commands = story.tell(Tick(), after_s=10)
    assert the(SendAdmit, commands).message.excluded == (D1.node,)


@pytest.mark.parametrize("state", [PullState.UNKNOWN, PullState.FAILED])
def test_a_page_that_says_lost_starts_again(state: PullState) -> None:
    story = Story()
    story.run()
    assert the(SendAdmit, story.page(state)).message.attempt == 2


def test_tokens_are_acknowledged_in_batches() -> None:
    story = Story(make_spec(max_new_tokens=100))
    story.run()
    story.tokens(0, range(10))
    ack = the(SendTokenAck, story.tokens(10, range(10, 40)))
    assert (ack.message.index, ack.message.finished) == (40, False)


@pytest.mark.parametrize("phase", ["placing", "sent", "running", "streaming"])
def test_a_client_that_goes_cancels_every_stage(phase: str) -> None:
    story = Story()
    story.tell(Submitted())
    if phase == "sent":
        story.place()
    elif phase in ("running", "streaming"):
        story.run()
    if phase == "streaming":
        story.tokens(0, [1])
    commands = story.tell(ClientGone())
    workers = {c.worker for c in commands if isinstance(c, SendCancel)}
    expected = {"placing": set[NodeRef](), "streaming": {D1}}.get(phase, {P1, D1})
    assert workers == expected
    assert the(RecordEnded, commands).message.outcome is Outcome.CANCELLED
    assert not [c for c in story.said if isinstance(c, Finish | Fail)]
    assert story.tell(ClientGone()) == []
    assert story.life.owned() == []


def test_a_cancel_repeats_until_it_is_acknowledged_or_its_worker_gone() -> None:
    story = Story()
    story.run()
    story.tell(ClientGone())
    assert kinds(story.tell(Tick(), after_s=0.5)) == [SendCancel, SendCancel]
    story.tell(CancelAcked(Stage.PREFILL, P1, 1))
    assert [
        c.worker for c in story.tell(Tick(), after_s=0.5) if isinstance(c, SendCancel)
    ] == [D1]
    assert not story.life.over
    story.tell(NodeGone(NodeRef(D1.node, 5)))
    assert story.life.over
    assert story.life.wake_s == float("inf")


def test_a_cancel_is_given_up_in_the_end() -> None:
    story = Story()
    story.run()
    story.tell(ClientGone())
    story.tell(Tick(), after_s=60)
    assert story.life.over


def test_the_owner_list_follows_the_work() -> None:
    story = Story()
    story.tell(Submitted())
    assert story.life.owned() == []
    story.place()
    ref = RequestRef(R, 1)
    assert sorted(story.life.owned(), key=str) == sorted(
        [(Stage.PREFILL, P1, ref), (Stage.DECODE, D1, ref)], key=str
    )
    story.tokens(0, [1])
    assert story.life.owned() == [(Stage.DECODE, D1, ref)]
    story.tokens(1, [2], FinishReason.STOP)
    assert story.life.owned() == []


def test_the_deadline_ends_it() -> None:
    story = Story()
    story.run()
    commands = story.tell(Tick(), after_s=60)
    assert the(Fail, commands).failure.kind is FailureKind.DEADLINE
    assert {c.worker for c in commands if isinstance(c, SendCancel)} == {P1, D1}


def test_a_shutdown_ends_it() -> None:
    story = Story()
    story.run()
    commands = story.tell(Aborted("drain"))
    assert the(Fail, commands).failure.kind is FailureKind.SHUTDOWN


class StopAt:
    """A text that is just numbers; a stop string is complete at ``token``."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.hit = False

    def push(self, token: int) -> str:
        self.hit = token == self.token
        return "" if self.hit else f"{token},"

    def finish(self) -> str:
        return "rest"


def test_a_stop_string_finishes_and_cancels_whatever_came_with_it() -> None:
    story = Story(text=StopAt(3))
    story.run()
    commands = story.tokens(0, [1, 2, 3, 4, 5], FinishReason.LENGTH)
    assert "".join(c.text for c in commands if isinstance(c, Emit)) == "1,2,"
    assert the(Finish, commands) == Finish(FinishReason.STOP, Usage(20, 3, 0))


def test_a_stop_string_in_mid_answer_cancels_decode() -> None:
    story = Story(text=StopAt(3))
    story.run()
    commands = story.tokens(0, [1, 2, 3, 4])
    assert the(SendCancel, commands).worker == D1
    assert the(Finish, commands).usage.output_tokens == 3
    assert story.tokens(4, [5]) == []


def test_held_text_comes_before_the_finish() -> None:
    story = Story(text=StopAt(99))
    story.run()
    commands = story.tokens(0, [1], FinishReason.STOP)
    assert [c.text for c in commands if isinstance(c, Emit)] == ["1,", "rest"]


def test_own_stop_ids_end_an_answer_that_ignores_the_end_token() -> None:
    story = Story(make_spec(ignore_eos=True, stop_token_ids=(7,), min_new_tokens=2))
    story.run()
    commands = story.tokens(0, [7, 1, 7, 5])
    assert story.ids == [7, 1]
    assert the(Finish, commands).reason is FinishReason.STOP


def test_rendezvous_moves_only_the_tenants_of_the_lost_conductor() -> None:
    nodes = [NodeRef(NodeId(f"c{i}"), 1) for i in range(4)]
    tenants = [TenantId(f"t{i}") for i in range(200)]
    before = {t: rendezvous_order(t, nodes)[0] for t in tenants}
    after = {t: rendezvous_order(t, nodes[:3])[0] for t in tenants}
    moved = [t for t in tenants if before[t] != after[t]]
    assert moved == [t for t in tenants if before[t] == nodes[3]]
    assert 20 < len(moved) < 80
