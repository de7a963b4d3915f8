"""The life of a request: placing it, and placing it again."""

import msgspec
import pytest
from tests.unit.gateway_story import (
    D1,
    D2,
    P1,
    P2,
    PROMPT,
    SPACE,
    R,
    Story,
    kinds,
    make_spec,
    placed,
    prefill_done,
    the,
)

from kvtide.bus.messages import (
    DecodeFailed,
    FinishReason,
    Outcome,
    RefuseCode,
    RejectCode,
    Rejected,
    WorkAccepted,
    WorkRefused,
)
from kvtide.gateway.life import (
    AdmitAnswered,
    AdmitLost,
    Emit,
    Fail,
    FailureKind,
    Finish,
    NodeGone,
    NodeJoined,
    RecordEnded,
    SendAdmit,
    SendCancel,
    SendDecodeWork,
    SendPrefillWork,
    SendTokenAck,
    Stage,
    Submitted,
    Tick,
    Usage,
    WorkAnswered,
    WorkerSaid,
    WorkLost,
)
from kvtide.kv import BlockKey, Located, NodeId, NodeRef, SlotRef, Tier


def located(key: BlockKey) -> Located:
    return Located(key, SlotRef(NodeId("s1"), 1, Tier.DRAM, 0, 0, 64, 1), 7)


@pytest.mark.parametrize("good", [0, 1, 2])
def test_copies_of_other_blocks_are_not_reused(good: int) -> None:
    prompt = tuple(range(10, 60))
    own = SPACE.chain(prompt)
    story = Story(make_spec(prompt=prompt, keys=own))
    story.tell(Submitted())
    foreign = SPACE.chain(tuple(range(100, 150)))
    told = (*own[:good], *foreign[good : good + 1], *own[good + 1 :])
    answer = msgspec.structs.replace(
        placed(1, P1, D1), reuse=tuple(map(located, (*told, foreign[0])))
    )
    said = story.tell(AdmitAnswered(answer))
    reuse = tuple(map(located, own[:good]))
    assert the(SendPrefillWork, said).message.reuse == reuse
    assert the(SendDecodeWork, said).message.reuse == reuse


def test_copies_of_its_own_blocks_are_reused() -> None:
    prompt = tuple(range(10, 60))
    own = SPACE.chain(prompt)
    story = Story(make_spec(prompt=prompt, keys=own))
    story.tell(Submitted())
    reuse = tuple(map(located, own))
    answer = msgspec.structs.replace(placed(1, P1, D1), reuse=reuse)
    said = story.tell(AdmitAnswered(answer))
    assert the(SendPrefillWork, said).message.reuse == reuse
    assert the(SendDecodeWork, said).message.reuse == reuse


def test_an_undisturbed_request_is_answered_and_recorded() -> None:
    story = Story()
    admit = the(SendAdmit, story.tell(Submitted()))
    assert (admit.rank, admit.message.attempt) == (0, 1)
    assert admit.message.keys == SPACE.chain(PROMPT)
    assert kinds(story.place()) == [SendPrefillWork, SendDecodeWork]
    accepted = WorkAccepted(request=R, attempt=1, start_ms=0)
    story.tell(WorkAnswered(Stage.PREFILL, P1, accepted))
    story.tell(WorkAnswered(Stage.DECODE, D1, accepted))
    story.tell(WorkerSaid(P1, prefill_done(reused=16)), after_s=0.5)
    story.tokens(0, [1, 2], reused=16)
    story.now_s += 1
    last = story.tokens(2, [3], FinishReason.STOP)

    assert kinds(last) == [Emit, Finish, SendTokenAck, RecordEnded]
    assert story.ids == [1, 2, 3]
    assert the(Finish, last) == Finish(FinishReason.STOP, Usage(20, 3, 16))
    assert the(SendTokenAck, last).message.finished
    record = the(RecordEnded, last).message
    assert record.outcome is Outcome.FINISHED
    assert (record.ttft_ms, record.tbt_ms, record.total_ms) == (500, 500, 1500)
    assert story.life.over


@pytest.mark.parametrize(
    ("code", "kind", "retry"),
    [
        (RejectCode.OVERLOADED, FailureKind.OVERLOADED, 250.0),
        (RejectCode.TENANT_LIMIT, FailureKind.TENANT_LIMIT, 250.0),
        (RejectCode.TOO_LARGE, FailureKind.TOO_LARGE, None),
        (RejectCode.UNKNOWN_MODEL, FailureKind.UNKNOWN_MODEL, None),
        (RejectCode.QUARANTINED, FailureKind.QUARANTINED, None),
    ],
)
def test_a_rejection_ends_it_before_any_work(
    code: RejectCode, kind: FailureKind, retry: float | None
) -> None:
    story = Story()
    story.tell(Submitted())
    reply = Rejected(request=R, attempt=1, code=code, reason="x", retry_after_ms=250)
    commands = story.tell(AdmitAnswered(reply))
    assert kinds(commands) == [Fail, RecordEnded]
    failure = the(Fail, commands).failure
    assert (failure.kind, failure.retry_after_ms) == (kind, retry)
    assert story.life.over


def test_a_silent_conductor_is_passed_over_after_its_patience() -> None:
    story = Story()
    story.tell(Submitted())
    assert story.tell(Tick(), after_s=0.2) == []
    admit = the(SendAdmit, story.tell(Tick(), after_s=0.05))
    assert (admit.rank, admit.message.attempt) == (1, 1)
    # the first one's late answer is as good as any
    assert kinds(story.place()) == [SendPrefillWork, SendDecodeWork]
    assert story.place(P2, D2) == []


def test_unreachable_conductors_are_asked_in_rounds_until_the_limit() -> None:
    story = Story()
    story.tell(Submitted())
    assert kinds(story.tell(AdmitLost(1, 0, live=2))) == [SendAdmit]
    assert story.tell(AdmitLost(1, 0, live=2)) == []  # a repeat
    assert story.tell(AdmitLost(1, 1, live=2)) == []  # both asked: wait
    assert story.tell(Tick(), after_s=0.25) == []  # the second gets twice the patience
    assert kinds(story.tell(Tick(), after_s=0.25)) == [SendAdmit]
    commands = story.tell(Tick(), after_s=10)
    assert the(Fail, commands).failure.kind is FailureKind.NO_CONDUCTOR


def test_without_any_conductor_it_fails_at_once() -> None:
    story = Story()
    story.tell(Submitted())
    commands = story.tell(AdmitLost(1, 0, live=0))
    assert the(Fail, commands).failure.kind is FailureKind.NO_CONDUCTOR


def test_a_refusing_worker_is_left_out_and_the_other_cancelled() -> None:
    story = Story()
    story.tell(Submitted())
    story.place()
    refused = WorkRefused(request=R, attempt=1, code=RefuseCode.BUSY, reason="full")
    commands = story.tell(WorkAnswered(Stage.DECODE, D1, refused))
    assert kinds(commands) == [SendCancel, SendAdmit]
    assert the(SendCancel, commands).worker == P1
    admit = the(SendAdmit, commands).message
    assert (admit.attempt, admit.excluded) == (2, (D1.node,))


def test_three_refusals_are_an_overload() -> None:
    story = Story()
    story.tell(Submitted())
    for attempt, decode in enumerate((D1, D2, D1), start=1):
        story.place(P1, decode)
        refused = WorkRefused(
            request=R, attempt=attempt, code=RefuseCode.BUSY, reason=""
        )
        story.tell(WorkAnswered(Stage.DECODE, decode, refused))
    assert the(Fail, story.said).failure.kind is FailureKind.OVERLOADED
    assert the(RecordEnded, story.said).message.outcome is Outcome.REJECTED
    assert [c.worker for c in story.said if isinstance(c, SendCancel)] == [P1] * 3


def test_a_worker_that_does_not_answer_in_time_is_cancelled_too() -> None:
    story = Story()
    story.tell(Submitted())
    story.place()
    accepted = WorkAccepted(request=R, attempt=1, start_ms=0)
    story.tell(WorkAnswered(Stage.DECODE, D1, accepted))
    commands = story.tell(Tick(), after_s=5)
    assert {c.worker for c in commands if isinstance(c, SendCancel)} == {P1, D1}
    assert the(SendAdmit, commands).message.excluded == (P1.node,)


def test_lost_work_is_placed_again() -> None:
    story = Story()
    story.tell(Submitted())
    story.place()
    commands = story.tell(WorkLost(Stage.PREFILL, P1, 1, "no responder"))
    assert the(SendAdmit, commands).message.attempt == 2
    assert story.tell(WorkLost(Stage.PREFILL, P1, 1, "no responder")) == []


def test_fail_over_goes_on_behind_the_received_tokens() -> None:
    story = Story()
    story.run()
    story.tokens(0, [1, 2, 3], reused=4)
    commands = story.tell(NodeGone(D1))
    admit = the(SendAdmit, commands).message
    assert (admit.attempt, admit.excluded) == (2, (D1.node,))
    assert (admit.prompt_tokens, admit.max_new_tokens) == (23, 5)
    assert not [c for c in commands if isinstance(c, SendCancel)]

    work = the(SendDecodeWork, story.place(P1, D2)).message
    assert work.tokens == (*PROMPT, 1, 2, 3)
    assert (work.prompt_tokens, work.max_new_tokens) == (20, 8)
    assert work.keys == SPACE.chain(work.tokens)
    # the dead one wakes: nothing changes
    assert story.tokens(3, [99], attempt=1) == []
    assert story.tokens(3, [99], attempt=2, decode=D1) == []
    story.tokens(3, [4], FinishReason.STOP, decode=D2, reused=20)
    assert story.ids == [1, 2, 3, 4]
    assert the(Finish, story.said).usage == Usage(20, 4, 4)


def test_the_last_token_before_a_loss_ends_the_answer() -> None:
    story = Story(make_spec(max_new_tokens=2))
    story.run()
    commands = story.tokens(0, [1, 2])
    assert the(Finish, commands).reason is FinishReason.LENGTH
    assert story.tell(NodeGone(D1)) == []


def test_after_the_third_placement_it_fails() -> None:
    story = Story()
    for decode in (D1, D2, D1):
        story.run(P1, decode)
        failed = DecodeFailed(
            request=R, attempt=story.life.attempt, decode=decode, code="oom", reason="x"
        )
        story.tell(WorkerSaid(decode, failed))
    assert the(Fail, story.said).failure.kind is FailureKind.WORKERS_FAILED
    assert the(RecordEnded, story.said).message.attempt == 3


def test_a_failure_counts_though_it_overtakes_the_workers_yes() -> None:
    story = Story()
    story.tell(Submitted())
    for decode in (D1, D2, D1):
        number = story.life.attempt
        story.tell(AdmitAnswered(placed(number, P1, decode)))
        failed = DecodeFailed(
            request=R, attempt=number, decode=decode, code="oom", reason="x"
        )
        story.tell(WorkerSaid(decode, failed))
    assert the(Fail, story.said).failure.kind is FailureKind.WORKERS_FAILED
    assert the(RecordEnded, story.said).message.attempt == 3


def test_a_worker_that_comes_back_is_no_longer_left_out() -> None:
    story = Story()
    story.run()
    story.tell(NodeGone(D1))
    story.tell(NodeJoined(NodeRef(D1.node, 2)))
    story.place(P1, D2)
    admit = the(SendAdmit, story.tell(NodeGone(D2))).message
    assert admit.excluded == (D2.node,)
