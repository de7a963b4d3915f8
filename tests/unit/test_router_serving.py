"""An engine's answers, in the words of decode workers."""

import json

import pytest
from tests.unit.test_router_cache import FACTS, ME

from kvtide.bus.messages import (
    Ack,
    Cancel,
    DecodeFailed,
    DecodeWork,
    FinishReason,
    GrammarLanguage,
    GrammarSpec,
    Owned,
    PictureWork,
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
from kvtide.kv import BlockKey, NodeId, NodeRef, RequestId, RequestRef, TenantId
from kvtide.router.answer import Delta
from kvtide.router.asking import EngineKind, Heard, data_of, dialect_of, seed_of
from kvtide.router.engine_load import EngineLoad, EngineMetrics, read_metrics
from kvtide.router.errors import EngineAnswerError
from kvtide.router.events import (
    AckArrived,
    Ask,
    Broken,
    Command,
    Ended,
    Event,
    HangUp,
    PullArrived,
    Said,
    WorkArrived,
)
from kvtide.router.serving import KEPT_S, Serving
from kvtide.worker import events as common

GATEWAY = NodeRef(NodeId("gateway"), 1)
REF = RequestRef(RequestId("r"), 1)


def work(attempt: int = 1, generated: int = 0, **given: object) -> DecodeWork:
    whole = {
        "request": REF.request,
        "attempt": attempt,
        "gateway": GATEWAY,
        "tenant": TenantId("t"),
        "salt": "",
        "model": "m",
        "tokens": tuple(range(100 + generated)),
        "prompt_tokens": 100,
        "keys": (BlockKey(b"k" * 16),) * 2,
        "reuse": (),
        "prefill": ME,
        "sampling": SamplingSpec(seed=7),
        "max_new_tokens": 20,
        "deadline_ms": 60_000.0,
        "stop_token_ids": (9,),
    }
    return DecodeWork(**{**whole, **given})  # pyright: ignore[reportArgumentType]


class Engine:
    """A machine whose engine is there."""

    def __init__(self, most_open: int = 8) -> None:
        self.machine = Serving(ME, FACTS, most_open=most_open)
        self.tell(common.StoreAttached(attached=True))

    def tell(
        self, event: Event | common.CommonEvent, now_s: float = 1.0
    ) -> list[Command]:
        return list(self.machine.handle(event, now_s))

    def reply(self, event: Event | common.CommonEvent) -> object:
        (reply,) = (c for c in self.tell(event) if isinstance(c, common.Reply))
        return reply.message


def said(commands: list[Command]) -> list[object]:
    return [c.message for c in commands if isinstance(c, common.ToGateway)]


def test_no_more_is_asked_of_an_engine_than_it_has_room_for() -> None:
    most = FACTS.max_tokens
    room = most - 100
    for asked, longest, least in (
        (work(max_new_tokens=most), room, 0),
        (work(generated=3, max_new_tokens=most, min_new_tokens=most), room, room),
        (work(max_new_tokens=20, min_new_tokens=7), 20, 7),
    ):
        [ask] = [c for c in Engine().tell(WorkArrived(asked)) if isinstance(c, Ask)]
        assert (ask.work.max_new_tokens, ask.work.min_new_tokens) == (longest, least)
        assert ask.work.tokens == asked.tokens


def test_tokens_go_to_the_gateway_as_the_engine_draws_them() -> None:
    engine = Engine()
    commands = engine.tell(WorkArrived(work(generated=3)))
    assert [type(each) for each in commands] == [Ask, common.Reply]
    assert engine.machine.open == 1
    (first,) = said(engine.tell(Said(REF, Delta((5, 6)))))
    assert isinstance(first, Tokens)
    assert (first.index, first.ids, first.reused_tokens) == (3, (5, 6), 0)
    last = Delta((7, 9), finish=FinishReason.STOP)
    (second,) = said(engine.tell(Said(REF, last)))
    assert isinstance(second, Tokens)
    assert (second.index, second.ids, second.finish) == (5, (7,), None)
    (end,) = said(engine.tell(Ended(REF, 64)))
    assert isinstance(end, Tokens)
    assert (end.index, end.ids, end.finish) == (6, (), FinishReason.STOP)
    assert end.reused_tokens == 64
    assert engine.machine.idle


def test_a_gap_is_filled_until_the_end_is_acknowledged() -> None:
    engine = Engine()
    pull = PullArrived(TokenPull(request=REF.request, attempt=1, choice=0, index=1))
    unknown = engine.reply(pull)
    assert isinstance(unknown, TokenPage)
    assert unknown.state is PullState.UNKNOWN
    engine.tell(WorkArrived(work()))
    engine.tell(Said(REF, Delta((4, 5, 6), finish=FinishReason.LENGTH)))
    page = engine.reply(pull)
    assert isinstance(page, TokenPage)
    assert (page.ids, page.state, page.finish) == ((5, 6), PullState.RUNNING, None)
    engine.tell(Ended(REF, None))
    page = engine.reply(pull)
    assert isinstance(page, TokenPage)
    assert (page.state, page.finish) == (PullState.FINISHED, FinishReason.LENGTH)
    ack = TokenAck(request=REF.request, attempt=1, choice=0, index=3, finished=True)
    engine.tell(AckArrived(ack))
    gone = engine.reply(pull)
    assert isinstance(gone, TokenPage)
    assert gone.state is PullState.UNKNOWN


def test_an_answer_that_nobody_acknowledges_is_forgotten_in_time() -> None:
    engine = Engine()
    engine.tell(WorkArrived(work()))
    engine.tell(Broken(REF, "engine", "no"))
    engine.tell(common.Tick(), 1.0 + KEPT_S + 1)
    pull = PullArrived(TokenPull(request=REF.request, attempt=1, choice=0, index=0))
    page = engine.reply(pull)
    assert isinstance(page, TokenPage)
    assert page.state is PullState.UNKNOWN


def test_cancels_and_lists_hang_up() -> None:
    engine = Engine()
    engine.tell(WorkArrived(work()))
    cancel = Cancel(request=REF.request, attempt=1, reason="client_gone")
    commands = engine.tell(common.CancelArrived(cancel))
    assert commands == [HangUp(REF), common.Reply(Ack())]
    refused = engine.reply(WorkArrived(work()))
    assert isinstance(refused, WorkRefused)
    assert refused.code is RefuseCode.CANCELLED
    engine.tell(WorkArrived(work(2)))
    for seq in (1, 2):
        owned = Owned(owner=GATEWAY, seq=seq, requests=())
        commands = engine.tell(common.OwnedArrived(owned))
    assert commands == [HangUp(RequestRef(REF.request, 2))]
    assert engine.machine.idle


def test_an_engine_that_goes_fails_what_it_has_and_takes_nothing() -> None:
    engine = Engine()
    engine.tell(WorkArrived(work()))
    commands = engine.tell(common.StoreAttached(attached=False))
    (failed,) = said(commands)
    assert isinstance(failed, DecodeFailed)
    assert failed.code == "engine_away"
    assert HangUp(REF) in commands
    refused = engine.reply(WorkArrived(work(2)))
    assert isinstance(refused, WorkRefused)
    assert refused.code is RefuseCode.LOADING
    engine.tell(common.StoreAttached(attached=True))
    assert isinstance(engine.reply(WorkArrived(work(3))), WorkAccepted)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"model": "other"}, RefuseCode.UNKNOWN_MODEL),
        ({"tokens": (1,) * 5000, "keys": (b"k" * 16,) * 80}, RefuseCode.TOO_LARGE),
        ({"worker": NodeRef(ME.node, 4)}, RefuseCode.OTHER_LIFE),
        (
            {
                "generated": 2,
                "sampling": SamplingSpec(
                    grammar=GrammarSpec(GrammarLanguage.REGEX, "a+")
                ),
            },
            RefuseCode.UNSUPPORTED,
        ),
    ],
)
def test_what_can_not_be_done_is_refused(
    given: dict[str, object], code: RefuseCode
) -> None:
    refused = Engine().reply(WorkArrived(work(**given)))  # pyright: ignore[reportArgumentType]
    assert isinstance(refused, WorkRefused)
    assert refused.code is code


def test_pictures_are_refused_for_the_engine_is_asked_with_tokens_alone() -> None:
    refused = Engine().reply(WorkArrived(PictureWork.of(work(), (b"x",))))
    assert isinstance(refused, WorkRefused)
    assert refused.code is RefuseCode.UNSUPPORTED


def test_no_more_are_taken_than_may_be_open() -> None:
    engine = Engine(most_open=1)
    engine.tell(WorkArrived(work()))
    assert isinstance(engine.reply(WorkArrived(work())), WorkAccepted)
    refused = engine.reply(WorkArrived(work(request=RequestId("other"))))
    assert isinstance(refused, WorkRefused)
    assert refused.code is RefuseCode.BUSY


def test_vllm_is_asked_for_the_rest_and_its_chunks_are_understood() -> None:
    dialect = dialect_of(EngineKind.VLLM)
    spec = SamplingSpec(temperature=0.5, seed=1, logprobs=1)
    body = dialect.body(work(generated=3, sampling=spec), "demo", "salt")
    assert json.loads(json.dumps(body)) == body
    assert (body["max_tokens"], len(body["prompt"])) == (17, 103)
    assert body["cache_salt"] == "salt"
    chunk = {
        "choices": [
            {
                "text": " x",
                "token_ids": [11],
                "finish_reason": "length",
                "logprobs": {
                    "tokens": ["token_id:11"],
                    "token_logprobs": [-0.5],
                    "top_logprobs": [{"token_id:12": -0.4, "token_id:11": -0.5}],
                },
            }
        ]
    }
    heard = dialect.hear(json.dumps(chunk).encode())
    assert heard.delta is not None
    assert (heard.delta.ids, heard.delta.finish) == ((11,), FinishReason.LENGTH)
    assert heard.delta.logprobs[0].top == ((12, -0.4), (11, -0.5))
    usage: dict[str, object] = {
        "choices": [],
        "usage": {"prompt_tokens_details": {"cached_tokens": 64}},
    }
    assert dialect.hear(json.dumps(usage).encode()) == Heard(None, 64)
    for wrong in (b'{"error": {"message": "out of memory"}}', b"<html>", b'{"choices"'):
        with pytest.raises(EngineAnswerError):
            dialect.hear(wrong)


def test_sglang_may_say_all_tokens_or_the_new_ones() -> None:
    for chunks in (([4], [4, 5, 6]), ([4], [5, 6])):
        dialect = dialect_of(EngineKind.SGLANG)
        ids: list[int] = []
        for count, output in zip((1, 3), chunks, strict=True):
            meta = {"completion_tokens": count, "finish_reason": None}
            event = json.dumps({"output_ids": output, "meta_info": meta}).encode()
            heard = dialect.hear(event)
            assert heard.delta is not None
            ids += heard.delta.ids
        assert ids == [4, 5, 6]


def test_seeds_differ_by_choice_and_by_where_an_answer_goes_on() -> None:
    choices = [work(sampling=SamplingSpec(seed=7, choice=n)) for n in range(2)]
    seeds = {seed_of(each) for each in (*choices, work(generated=1))}
    assert len(seeds) == 3
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_lines_of_a_stream() -> None:
    assert data_of('data: {"a": 1}') == '{"a": 1}'
    assert [data_of(line) for line in ("", ": ping", "data: [DONE]")] == [None] * 3


def test_load_is_read_from_metrics() -> None:
    text = (
        "# HELP vllm:num_requests_running x\n"
        'vllm:num_requests_running{engine="0"} 2.0\n'
        'vllm:num_requests_running{engine="1"} 1.0\n'
        'vllm:num_requests_waiting{engine="0"} 4.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
    )
    assert read_metrics(EngineKind.VLLM, text) == EngineMetrics(3, 4, 0.25, 1600, 16)
    load = EngineLoad(read_metrics(EngineKind.VLLM, text))
    load.began(100, 28, 50.0, alone=True)
    load.stepped(2, 20.0)
    assert load.prefill().queued_tokens == 400
    step = load.prefill().step
    assert step is not None
    assert (step.new, step.ms) == (100, 50.0)
    assert load.decode().kv_tokens_used == 400
    later = load.decode().step
    assert later is not None
    assert (later.rows, later.attended, later.ms) == (3, 400, 10.0)
    other = "sglang:num_running_reqs 1\nsglang:token_usage 0.5\n"
    assert read_metrics(EngineKind.SGLANG, other).running == 1
