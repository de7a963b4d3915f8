"""Both roles on an engine that runs whole requests: what it is asked, what is said."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvtide.bus.messages import (
    Cancel,
    DecodeFailed,
    DecodeWork,
    Failure,
    FinishReason,
    HandoverPull,
    HandoverState,
    HandoverTaken,
    Message,
    PictureWork,
    PrefillDone,
    PrefillFailed,
    PrefillWork,
    PullState,
    RefuseCode,
    SamplingSpec,
    TokenAck,
    TokenPage,
    TokenPull,
    Tokens,
    WorkAccepted,
    WorkRefused,
)
from kvtide.decode import events as decode
from kvtide.decode.answering import Answering
from kvtide.decode.answering_machine import (
    AnswerFailed,
    AnsweringMachine,
    Drew,
    Generate,
    Stop,
)
from kvtide.decode.limits import DecodeLimits
from kvtide.engine.serving import Piece
from kvtide.kv import BlockKey, NodeId, NodeRef, RequestId, RequestRef, TenantId
from kvtide.prefill import events as prefill
from kvtide.prefill.limits import PrefillLimits
from kvtide.prefill.preparing import (
    Prepare,
    Prepared,
    PrepareFailed,
    PreparingMachine,
    Stop as StopPreparing,
)
from kvtide.worker.events import Reply

ME = NodeRef(NodeId("me"), 1)
OTHER = NodeRef(NodeId("other"), 1)
GATEWAY = NodeRef(NodeId("gateway"), 1)
REF = RequestRef(RequestId("r"), 1)
EOS = 2
LIMITS = DecodeLimits(batch=2, waiting=0, silence_s=0.5, asks=2)
PROMPT = (5, 6, 7)


def decode_work(prefilling: NodeRef | None = None, **more: Any) -> DecodeWork:
    given: dict[str, Any] = {"max_new_tokens": 4, "tokens": PROMPT, **more}
    return DecodeWork(
        request=RequestId("r"),
        attempt=1,
        gateway=GATEWAY,
        tenant=TenantId("t"),
        salt="",
        model="m",
        prompt_tokens=len(PROMPT),
        keys=(),
        reuse=(),
        prefill=prefilling,
        sampling=SamplingSpec(temperature=0.0),
        deadline_ms=10_000.0,
        **given,
    )


def prefill_work(decoding: NodeRef) -> PrefillWork:
    return PrefillWork(
        request=RequestId("r"),
        attempt=1,
        gateway=GATEWAY,
        tenant=TenantId("t"),
        salt="",
        model="m",
        tokens=PROMPT,
        keys=(),
        reuse=(),
        decode=decoding,
        deadline_ms=10_000.0,
    )


def done(sender: NodeRef) -> PrefillDone:
    machine = preparing()
    machine.handle(prefill.WorkArrived(prefill_work(ME)), 0.0)
    (said, *_) = machine.handle(Prepared(REF, 0), 0.0)
    assert isinstance(said, prefill.ToDecode)
    message = said.message
    assert isinstance(message, PrefillDone)
    assert message.prefill == OTHER
    assert sender == OTHER
    return message


def answering() -> AnsweringMachine:
    machine = AnsweringMachine(ME, LIMITS)
    machine.handle(decode.ModelLoaded("m", 100, 16, 2, (EOS,), 60), 0.0)
    return machine


def preparing() -> PreparingMachine:
    machine = PreparingMachine(OTHER, PrefillLimits(jobs=2))
    machine.handle(prefill.ModelLoaded("m", 100, 16), 0.0)
    machine.handle(prefill.StoreAttached(attached=True), 0.0)
    return machine


def said(commands: Sequence[object]) -> list[Message]:
    return [one.message for one in commands if isinstance(one, decode.ToGateway)]


def replied(commands: Sequence[object]) -> Message:
    (message,) = [one.message for one in commands if isinstance(one, Reply)]
    return message


def asked(commands: Sequence[object]) -> Generate:
    (found,) = [one for one in commands if isinstance(one, Generate)]
    return found


def test_an_answer_is_told_piece_by_piece_and_kept_until_it_is_acknowledged() -> None:
    machine = answering()
    commands = machine.handle(decode.WorkArrived(decode_work()), 1.0)
    assert isinstance(replied(commands), WorkAccepted)
    ask = asked(commands).ask
    assert (ask.tokens, ask.max_tokens, ask.stop_ids) == (PROMPT, 4, (EOS,))
    assert not ask.handed
    assert machine.load().waiting == 1
    (first,) = said(machine.handle(Drew(REF, Piece((9, 8), cached_tokens=2)), 1.5))
    assert isinstance(first, Tokens)
    assert (first.index, first.ids, first.reused_tokens) == (0, (9, 8), 2)
    assert machine.load().running == 1
    commands = machine.handle(Drew(REF, Piece((EOS,), ended=True)), 1.6)
    (last,) = said(commands)
    assert isinstance(last, Tokens)
    assert (last.ids, last.finish) == ((), FinishReason.STOP)
    assert Stop(REF) in commands
    pull = TokenPull(request=REF.request, attempt=1, choice=0, index=1)
    page = replied(machine.handle(decode.PullArrived(pull), 1.7))
    assert isinstance(page, TokenPage)
    assert (page.ids, page.state) == ((8,), PullState.FINISHED)
    ack = TokenAck(request=REF.request, attempt=1, choice=0, index=2, finished=True)
    machine.handle(decode.AckArrived(ack), 1.8)
    assert machine.idle


def test_what_comes_beyond_the_limit_is_dropped() -> None:
    machine = answering()
    machine.handle(decode.WorkArrived(decode_work(max_new_tokens=2)), 1.0)
    (words,) = said(machine.handle(Drew(REF, Piece((9, 8, 7))), 1.1))
    assert isinstance(words, Tokens)
    assert (words.ids, words.finish) == ((9, 8), FinishReason.LENGTH)


def test_a_later_attempt_goes_on_where_the_answer_stands() -> None:
    machine = answering()
    work = decode_work(tokens=(*PROMPT, 9, 8), max_new_tokens=4, min_new_tokens=3)
    ask = asked(machine.handle(decode.WorkArrived(work), 1.0)).ask
    assert (ask.answered, ask.max_tokens, ask.min_tokens) == (2, 2, 1)
    (words,) = said(machine.handle(Drew(REF, Piece((7,))), 1.1))
    assert isinstance(words, Tokens)
    assert words.index == 2


def test_the_prefill_of_this_node_is_the_engines_own() -> None:
    machine = answering()
    asked(machine.handle(decode.WorkArrived(decode_work(ME)), 1.0))
    commands = machine.handle(Drew(REF, Piece((9,), cached_tokens=1)), 1.5)
    made, words = said(commands)
    assert isinstance(made, PrefillDone)
    assert (made.prefill, made.reused_tokens, made.computed_tokens) == (ME, 1, 2)
    assert isinstance(words, Tokens)
    assert decode.TellTaken(REF, ME) in commands


def test_decode_waits_for_the_prefill_of_another_node() -> None:
    machine = answering()
    commands = machine.handle(decode.WorkArrived(decode_work(OTHER)), 1.0)
    assert not [one for one in commands if isinstance(one, Generate)]
    commands = machine.handle(decode.HandoverSaid(done(OTHER)), 1.2)
    assert asked(commands).ask.handed


def test_words_of_prefill_may_overtake_the_work() -> None:
    machine = answering()
    machine.handle(decode.HandoverSaid(done(OTHER)), 0.9)
    commands = machine.handle(decode.WorkArrived(decode_work(OTHER)), 1.0)
    assert asked(commands).ask.handed


@pytest.mark.parametrize("how", ["gone", "failed", "silent"])
def test_without_the_other_prefill_the_engine_computes_all(how: str) -> None:
    machine = answering()
    machine.handle(decode.WorkArrived(decode_work(OTHER)), 1.0)
    commands: Sequence[object] = ()
    if how == "gone":
        commands = machine.handle(decode.MemberGone(OTHER), 1.1)
    elif how == "failed":
        failed = PrefillFailed(
            request=REF.request, attempt=1, prefill=OTHER, code="x", reason="y"
        )
        commands = machine.handle(decode.HandoverSaid(failed), 1.1)
    else:
        for now_s in (2.0, 3.0):
            ticked = machine.handle(decode.Tick(), now_s)
            assert decode.AskHandover(REF, OTHER) in ticked
            commands = machine.handle(decode.HandoverAnswered(REF, None), now_s)
    assert not asked(commands).ask.handed


def test_a_cancel_stops_the_engine_and_nothing_is_held() -> None:
    machine = answering()
    machine.handle(decode.WorkArrived(decode_work()), 1.0)
    cancel = Cancel(request=REF.request, attempt=1, reason="gone")
    commands = machine.handle(decode.CancelArrived(cancel), 1.1)
    assert Stop(REF) in commands
    assert machine.idle
    assert machine.handle(Drew(REF, Piece((9,))), 1.2) == []


def test_each_end_without_an_answer_is_said_once() -> None:
    machine = answering()
    machine.handle(decode.WorkArrived(decode_work()), 1.0)
    (failed,) = said(machine.handle(AnswerFailed(REF, "broken"), 1.1))
    assert isinstance(failed, DecodeFailed)
    assert said(machine.handle(AnswerFailed(REF, "broken"), 1.2)) == []
    late = answering()
    late.handle(decode.WorkArrived(decode_work()), 1.0)
    commands = late.handle(decode.Tick(), 12.0)
    (failed,) = said(commands)
    assert isinstance(failed, DecodeFailed)
    assert failed.code == "deadline"
    assert Stop(REF) in commands
    ended = answering()
    ended.handle(decode.WorkArrived(decode_work()), 1.0)
    (_, failed) = said(ended.handle(Drew(REF, Piece((9,), ended=True)), 1.1))
    assert isinstance(failed, DecodeFailed)


def test_an_adapter_is_asked_for_by_its_name_and_no_other_is_taken() -> None:
    machine = AnsweringMachine(ME, LIMITS)
    served = decode.ModelLoaded(
        "m", 100, 16, 2, (EOS,), 60, adapted=frozenset({"m", "tuned"})
    )
    machine.handle(served, 0.0)
    work = msgspec.structs.replace(decode_work(), model="strange")
    refused = replied(machine.handle(decode.WorkArrived(work), 1.0))
    assert isinstance(refused, WorkRefused)
    assert refused.code is RefuseCode.UNKNOWN_MODEL
    work = msgspec.structs.replace(work, request=RequestId("s"), model="tuned")
    commands = machine.handle(decode.WorkArrived(work), 1.0)
    assert isinstance(replied(commands), WorkAccepted)
    assert asked(commands).ask.model == "tuned"


def test_what_does_not_fit_is_refused() -> None:
    machine = answering()
    tokens = tuple(range(10, 70))
    keys = (BlockKey(bytes(16)),) * 4
    long = msgspec.structs.replace(
        decode_work(max_new_tokens=40), tokens=tokens, prompt_tokens=60, keys=keys
    )
    refused = replied(machine.handle(decode.WorkArrived(long), 1.0))
    assert isinstance(refused, WorkRefused)
    assert refused.code is RefuseCode.TOO_LARGE
    machine.handle(decode.Drain(), 1.0)
    refused = replied(machine.handle(decode.WorkArrived(decode_work()), 1.0))
    assert isinstance(refused, WorkRefused)
    assert refused.code is RefuseCode.DRAINING


def test_what_the_engine_cannot_do_is_said_as_such() -> None:
    machine = answering()
    machine.handle(decode.WorkArrived(decode_work()), 1.0)
    failed = AnswerFailed(REF, "no such grammar", RefuseCode.UNSUPPORTED)
    (told,) = said(machine.handle(failed, 1.1))
    assert isinstance(told, DecodeFailed)
    assert (told.code, told.reason) == ("unsupported", "no such grammar")


def seeing(limits: DecodeLimits = LIMITS) -> AnsweringMachine:
    machine = AnsweringMachine(ME, limits)
    loaded = decode.ModelLoaded("m", 100, 16, 2, (EOS,), 60, pictures=True)
    machine.handle(loaded, 0.0)
    return machine


def picture_work(**more: Any) -> PictureWork:
    return PictureWork.of(decode_work(**more), (b"a picture",))


def test_an_engine_that_sees_gets_the_pictures_and_nobody_keeps_them() -> None:
    machine = seeing()
    # no keys: they are made of tokens, on which the KV does not depend alone
    tokens = tuple(range(10, 50))
    work = msgspec.structs.replace(
        picture_work(tokens=tokens), prompt_tokens=len(tokens)
    )
    arrived = machine.handle(decode.WorkArrived(work), 1.0)
    assert isinstance(replied(arrived), WorkAccepted)
    assert asked(arrived).ask.pictures == (b"a picture",)
    model = decode.ModelLoaded("m", 100, 16, 2, (EOS,), 60, pictures=True)
    one = Answering.of(work, model, ME, 1.0)
    assert one.ask(1.0).pictures == (b"a picture",)
    assert isinstance(one.work, PictureWork)
    assert one.work.pictures == ()


def test_pictures_of_open_requests_are_bounded_until_they_end() -> None:
    machine = seeing(replace(LIMITS, waiting=9, picture_bytes=20))

    def arrive(name: str, work: DecodeWork) -> Message:
        named = msgspec.structs.replace(work, request=RequestId(name))
        return replied(machine.handle(decode.WorkArrived(named), 1.0))

    assert isinstance(arrive("a", picture_work()), WorkAccepted)
    assert isinstance(arrive("b", picture_work()), WorkAccepted)
    refused = arrive("c", picture_work())
    assert isinstance(refused, WorkRefused)
    assert refused.code is RefuseCode.BUSY
    assert "18 bytes" in refused.reason
    assert isinstance(arrive("d", decode_work()), WorkAccepted)
    machine.handle(AnswerFailed(RequestRef(RequestId("a"), 1), "broken"), 1.1)
    assert isinstance(arrive("c", picture_work()), WorkAccepted)


def test_an_engine_that_sees_nothing_refuses_pictures() -> None:
    refused = replied(answering().handle(decode.WorkArrived(picture_work()), 1.0))
    assert isinstance(refused, WorkRefused)
    assert refused.code is RefuseCode.UNSUPPORTED
    assert "takes no pictures" in refused.reason


def test_a_prompt_that_pictures_made_longer_leaves_less_room() -> None:
    machine = seeing()
    machine.handle(decode.WorkArrived(picture_work(max_new_tokens=40)), 1.0)
    assert machine.load().kv_tokens_promised == len(PROMPT)
    piece = Piece((9, 8), cached_tokens=64, prompt_tokens=97)
    (told,) = said(machine.handle(Drew(REF, piece), 1.1))
    assert isinstance(told, Tokens)
    assert (told.prompt_tokens, told.reused_tokens) == (97, 64)
    assert machine.load().kv_tokens_used == 99
    pull = TokenPull(request=RequestId("r"), attempt=1, choice=0, index=0)
    page = replied(machine.handle(decode.PullArrived(pull), 1.1))
    assert isinstance(page, TokenPage)
    assert (page.prompt_tokens, page.reused_tokens) == (97, 64)
    # the engine ends it where its context does, and that is the answer's end
    piece = Piece((7,), ended=True, prompt_tokens=97)
    (last,) = said(machine.handle(Drew(REF, piece), 1.2))
    assert isinstance(last, Tokens)
    assert (last.ids, last.finish) == ((7,), FinishReason.LENGTH)
    assert last.prompt_tokens is None
    # the event that said it may be lost
    page = replied(machine.handle(decode.PullArrived(pull), 1.3))
    assert isinstance(page, TokenPage)
    assert (page.state, page.ids) == (PullState.FINISHED, (9, 8, 7))
    assert (page.prompt_tokens, page.reused_tokens) == (97, 64)


def test_prefill_computes_for_others_and_leaves_its_own_to_decode() -> None:
    machine = preparing()
    commands = machine.handle(prefill.WorkArrived(prefill_work(OTHER)), 1.0)
    assert [one for one in commands if isinstance(one, Prepare)] == []
    assert machine.idle
    other = preparing()
    commands = other.handle(prefill.WorkArrived(prefill_work(ME)), 1.0)
    (prepare,) = [one for one in commands if isinstance(one, Prepare)]
    assert prepare.ask.tokens == PROMPT
    assert not other.idle
    commands = other.handle(Prepared(REF, 1), 2.0)
    to_decode, to_gateway = commands[0], commands[1]
    assert isinstance(to_decode, prefill.ToDecode)
    assert isinstance(to_gateway, prefill.ToGateway)
    assert to_decode.message == to_gateway.message
    pull = HandoverPull(request=REF.request, attempt=1)
    state = replied(other.handle(prefill.PullArrived(pull), 2.1))
    assert isinstance(state, HandoverState)
    assert state.done == to_decode.message
    taken = HandoverTaken(request=REF.request, attempt=1)
    other.handle(prefill.TakenArrived(taken), 2.2)
    assert isinstance(replied(other.handle(prefill.PullArrived(pull), 2.3)), Failure)


@pytest.mark.parametrize(
    "end",
    [
        prefill.CancelArrived(Cancel(request=REF.request, attempt=1, reason="")),
        prefill.MemberGone(ME),
        prefill.MemberGone(GATEWAY),
        prefill.Fenced(NodeRef(NodeId("other"), 2)),
    ],
)
def test_prefill_stops_when_nobody_wants_it(end: Any) -> None:
    machine = preparing()
    machine.handle(prefill.WorkArrived(prefill_work(ME)), 1.0)
    assert StopPreparing(REF) in machine.handle(end, 1.1)
    assert machine.idle
    assert machine.handle(Prepared(REF, 0), 1.2) == []


def test_a_prefill_that_fails_or_is_late_is_said() -> None:
    machine = preparing()
    machine.handle(prefill.WorkArrived(prefill_work(ME)), 1.0)
    commands = machine.handle(PrepareFailed(REF, "broken"), 1.1)
    assert isinstance(commands[0], prefill.ToDecode)
    assert isinstance(commands[0].message, PrefillFailed)
    assert commands[0].message.code == "engine"
    machine = preparing()
    machine.handle(prefill.WorkArrived(prefill_work(ME)), 1.0)
    failed = PrepareFailed(REF, "no store", RefuseCode.NO_STORE)
    for told in machine.handle(failed, 1.1)[:2]:
        assert isinstance(told, prefill.ToDecode | prefill.ToGateway)
        assert isinstance(told.message, PrefillFailed)
        assert (told.message.code, told.message.reason) == ("no_store", "no store")
    late = preparing()
    late.handle(prefill.WorkArrived(prefill_work(ME)), 1.0)
    commands = late.handle(prefill.Tick(), 12.0)
    assert StopPreparing(REF) in commands
    assert late.idle
