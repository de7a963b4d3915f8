"""A request that lost its workers: how long it waits, how often it is placed."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.unit.gateway_story import (
    D1,
    D2,
    LIMITS,
    P1,
    PROMPT,
    R,
    Story,
    kinds,
    make_spec,
    the,
)

from kvtide.bus.messages import (
    DecodeFailed,
    FinishReason,
    Outcome,
    RefuseCode,
    RejectCode,
    Rejected,
    WorkRefused,
)
from kvtide.gateway.api.problems import of_failure
from kvtide.gateway.life import (
    AdmitAnswered,
    AdmitLost,
    Fail,
    FailureKind,
    NodeGone,
    NodeJoined,
    Quarantine,
    RecordEnded,
    SendAdmit,
    SendDecodeWork,
    Stage,
    Submitted,
    Tick,
    WorkAnswered,
    WorkerSaid,
    WorkLost,
)
from kvtide.kv import NodeRef, TenantId


def reject(story: Story, code: RejectCode = RejectCode.NO_WORKERS) -> None:
    reply = Rejected(request=R, attempt=story.life.attempt, code=code, reason="none")
    assert story.tell(AdmitAnswered(reply)) == []


def asked_again(story: Story) -> SendAdmit:
    """The next question; cancels may repeat meanwhile."""
    for _ in range(20):
        story.now_s = story.life.wake_s
        for command in story.tell(Tick()):
            if isinstance(command, SendAdmit):
                return command
    raise AssertionError("it never asks again")


@pytest.mark.parametrize("code", [RejectCode.NO_WORKERS, RejectCode.OVERLOADED])
def test_a_stream_waits_for_its_only_worker_and_goes_on(code: RejectCode) -> None:
    story = Story()
    story.run()
    story.tokens(0, [1, 2, 3])
    story.tell(NodeGone(D1))
    pauses: list[float] = []
    asked: list[SendAdmit] = []
    for _ in range(9):
        reject(story, code)
        before_s = story.now_s
        asked.append(asked_again(story))
        pauses.append(story.now_s - before_s)
    # ever rarer, never rare; each question is an attempt of its own
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(LIMITS.again_most_s)
    numbers = [(admit.rank, admit.message.attempt) for admit in asked]
    assert numbers == [(0, attempt) for attempt in range(3, 12)]
    back = NodeRef(D1.node, 2)
    story.tell(NodeJoined(back))
    work = the(SendDecodeWork, story.place(P1, back)).message
    assert work.tokens == (*PROMPT, 1, 2, 3)
    story.tokens(3, [4], FinishReason.STOP, decode=back)
    assert story.ids == [1, 2, 3, 4]


def test_it_waits_no_longer_than_its_limit() -> None:
    story = Story()
    story.run()
    start_s = story.now_s
    story.tell(NodeGone(D1))
    while not story.life.answered:
        reply = Rejected(
            request=R,
            attempt=story.life.attempt,
            code=RejectCode.NO_WORKERS,
            reason="none",
        )
        if not story.tell(AdmitAnswered(reply)):
            asked_again(story)
    assert the(Fail, story.said).failure.kind is FailureKind.NO_WORKERS
    waited_s = story.now_s - start_s
    assert LIMITS.again_limit_s <= waited_s < LIMITS.again_limit_s + 1
    assert the(RecordEnded, story.said).message.outcome is Outcome.REJECTED


def test_without_a_conductor_a_stream_waits_too() -> None:
    story = Story()
    story.run()
    story.tell(NodeGone(D1))
    start_s = story.now_s
    rank = 0
    while story.now_s < start_s + 10:
        assert story.tell(AdmitLost(2, rank, live=0)) == []
        rank = asked_again(story).rank
    story.place(P1, D2)
    story.tokens(0, [7], FinishReason.STOP, decode=D2)
    assert story.ids == [7]


def test_those_left_out_are_better_than_nobody() -> None:
    story = Story()
    story.run()
    assert the(SendAdmit, story.tell(NodeGone(D1))).message.excluded == (D1.node,)
    reject(story)
    assert asked_again(story).message.excluded == ()


def test_a_life_that_came_back_before_its_loss_was_noticed_is_not_left_out() -> None:
    story = Story()
    story.run()
    story.tell(NodeJoined(NodeRef(D2.node, 2)))
    story.tell(NodeGone(D1))
    story.place(P1, D2)
    commands = story.tell(WorkLost(Stage.DECODE, D2, 2, "no responder"))
    assert the(SendAdmit, commands).message.excluded == (D1.node,)


def lose(story: Story, decode: NodeRef) -> None:
    story.tell(NodeGone(decode))


def fail(story: Story, decode: NodeRef) -> None:
    failed = DecodeFailed(
        request=R, attempt=story.life.attempt, decode=decode, code="oom", reason=""
    )
    story.tell(WorkerSaid(decode, failed))


@pytest.mark.parametrize(
    ("harm", "kind"),
    [(lose, FailureKind.QUARANTINED), (fail, FailureKind.WORKERS_FAILED)],
)
def test_three_placements_that_ran_are_all(
    harm: Callable[[Story, NodeRef], None], kind: FailureKind
) -> None:
    story = Story()
    for life in (1, 2, 3):
        assert not story.life.answered
        decode = NodeRef(D1.node, life)
        story.run(P1, decode)
        story.tokens(life - 1, [life], decode=decode)
        harm(story, decode)
        # what never ran does not count
        if not story.life.answered:
            reject(story)
            asked_again(story)
            refused = WorkRefused(
                request=R, attempt=story.life.attempt, code=RefuseCode.BUSY, reason=""
            )
            story.place(P1, D2)
            story.tell(WorkAnswered(Stage.DECODE, D2, refused))
            reject(story)
            asked_again(story)
    assert the(Fail, story.said).failure.kind is kind
    assert the(RecordEnded, story.said).message.outcome is Outcome.FAILED


@pytest.mark.parametrize("answered", [0, 3])
def test_two_workers_that_died_at_the_same_token_are_enough(answered: int) -> None:
    story = Story()
    first, second = NodeRef(D1.node, 1), NodeRef(D1.node, 2)
    story.run(P1, first)
    if answered:
        story.tokens(0, list(range(answered)), decode=first)
    lose(story, first)
    reject(story)
    asked_again(story)
    story.run(P1, second)
    assert not story.life.answered
    lose(story, second)
    assert the(Fail, story.said).failure.kind is FailureKind.QUARANTINED


def test_nobody_waits_before_a_worker_took_the_request() -> None:
    story = Story()
    story.tell(Submitted())
    story.place()
    busy = WorkRefused(request=R, attempt=1, code=RefuseCode.BUSY, reason="full")
    story.tell(WorkAnswered(Stage.DECODE, D1, busy))
    none = Rejected(request=R, attempt=2, code=RejectCode.NO_WORKERS, reason="none")
    assert kinds(story.tell(AdmitAnswered(none))) == [Fail, RecordEnded]


def test_what_no_engine_can_do_ends_at_once_and_says_so() -> None:
    story = Story()
    story.tell(Submitted())
    story.place()
    unable = WorkRefused(
        request=R, attempt=1, code=RefuseCode.UNSUPPORTED, reason="use a JSON schema"
    )
    story.tell(WorkAnswered(Stage.DECODE, D1, unable))
    assert the(RecordEnded, story.said).message.outcome is Outcome.REJECTED
    error = of_failure(the(Fail, story.said).failure)
    assert (error.status, error.code) == (400, "unsupported_option")
    assert str(error) == "use a JSON schema"


def test_what_an_engine_finds_out_late_that_it_cannot_do_is_not_tried_again() -> None:
    story = Story()
    story.run(P1, D1)
    failed = DecodeFailed(
        request=R, attempt=1, decode=D1, code=RefuseCode.UNSUPPORTED, reason="ask anew"
    )
    story.tell(WorkerSaid(D1, failed))
    failure = the(Fail, story.said).failure
    assert (failure.kind, failure.reason) == (FailureKind.UNSUPPORTED, "ask anew")


def test_what_cannot_be_gone_on_with_is_the_lost_workers_fault() -> None:
    story = Story()
    story.run()
    story.tokens(0, [1, 2, 3])
    story.tell(NodeGone(D1))
    story.place(P1, D2)
    unable = WorkRefused(
        request=R, attempt=2, code=RefuseCode.UNSUPPORTED, reason="ask anew"
    )
    story.tell(WorkAnswered(Stage.DECODE, D2, unable))
    failure = the(Fail, story.said).failure
    assert (failure.kind, failure.reason) == (FailureKind.WORKERS_FAILED, "ask anew")


def test_a_prompt_is_refused_for_a_while() -> None:
    quarantine = Quarantine(60.0)
    spec = make_spec()
    quarantine.add(spec, 10.0)
    assert quarantine.refuses(replace(spec, max_new_tokens=3), 69.9)
    assert not quarantine.refuses(replace(spec, prompt=(*PROMPT, 1)), 20.0)
    assert not quarantine.refuses(replace(spec, tenant=TenantId("other")), 20.0)
    assert not quarantine.refuses(spec, 70.0)


def test_no_quarantine_by_setting() -> None:
    quarantine = Quarantine(0.0)
    quarantine.add(make_spec(), 10.0)
    assert not quarantine.refuses(make_spec(), 10.0)
