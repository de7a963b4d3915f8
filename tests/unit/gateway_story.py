"""A request's life as a test tells it, and the words it needs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from kvtide.bus.messages import (
    CandidateEstimate,
    FinishReason,
    Placed,
    PrefillDone,
    PrefillTimes,
    PullState,
    SamplingSpec,
    TokenPage,
    Tokens,
    WorkAccepted,
)
from kvtide.gateway.life import (
    AdmitAnswered,
    Command,
    Emit,
    Event,
    Life,
    LifeLimits,
    NoText,
    PullAnswered,
    RequestSpec,
    Stage,
    Submitted,
    TextSink,
    WorkAnswered,
    WorkerSaid,
)
from kvtide.kv import (
    KeySpace,
    ModelFacts,
    NodeId,
    NodeRef,
    RequestId,
    SpaceId,
    TenantId,
)

T = TypeVar("T")
R = RequestId("r1")
GATEWAY = NodeRef(NodeId("gw"), 1)
P1, P2 = NodeRef(NodeId("p1"), 1), NodeRef(NodeId("p2"), 1)
D1, D2 = NodeRef(NodeId("d1"), 1), NodeRef(NodeId("d2"), 1)
FACTS = ModelFacts(
    name="m",
    digest="00",
    layers=1,
    kv_heads=1,
    head_dim=2,
    kv_dtype="float32",
    vocab_size=1000,
    max_tokens=4096,
    eos_token_ids=(2,),
    numerics="n",
    block_tokens=16,
)
SPACE = KeySpace(b"s" * 32, SpaceId(TenantId("t"), FACTS))
PROMPT = tuple(range(10, 30))
LIMITS = LifeLimits(deadline_s=60)


def make_spec(**changes: object) -> RequestSpec:
    spec = RequestSpec(
        request=R,
        gateway=GATEWAY,
        tenant=TenantId("t"),
        salt="",
        model="m",
        prompt=PROMPT,
        keys=SPACE.chain(PROMPT),
        sampling=SamplingSpec(temperature=0),
        max_new_tokens=8,
    )
    return replace(spec, **changes)


class Story:
    """A life and its clock; ``said`` is every command so far."""

    def __init__(
        self, spec: RequestSpec | None = None, text: TextSink | None = None
    ) -> None:
        self.life = Life(spec or make_spec(), SPACE, text or NoText(), LIMITS)
        self.now_s = 100.0
        self.said: list[Command] = []

    def tell(self, event: Event, after_s: float = 0.0) -> list[Command]:
        self.now_s += after_s
        commands = self.life.handle(event, self.now_s)
        self.said += commands
        return commands

    def place(
        self, prefill: NodeRef | None = P1, decode: NodeRef = D1
    ) -> list[Command]:
        return self.tell(AdmitAnswered(placed(self.life.attempt, prefill, decode)))

    def run(self, prefill: NodeRef | None = P1, decode: NodeRef = D1) -> None:
        if self.life.attempt == 0:
            self.tell(Submitted())
        self.place(prefill, decode)
        accepted = WorkAccepted(request=R, attempt=self.life.attempt, start_ms=0)
        if prefill is not None:
            self.tell(WorkAnswered(Stage.PREFILL, prefill, accepted))
        self.tell(WorkAnswered(Stage.DECODE, decode, accepted))

    def tokens(
        self,
        index: int,
        ids: Sequence[int],
        finish: FinishReason | None = None,
        *,
        attempt: int = 0,
        decode: NodeRef = D1,
        reused: int | None = None,
    ) -> list[Command]:
        message = Tokens(
            request=R,
            attempt=attempt or self.life.attempt,
            decode=decode,
            choice=0,
            index=index,
            ids=tuple(ids),
            finish=finish,
            reused_tokens=reused,
        )
        return self.tell(WorkerSaid(decode, message))

    def page(
        self,
        state: PullState,
        index: int = 0,
        ids: Sequence[int] = (),
        finish: FinishReason | None = None,
    ) -> list[Command]:
        page = TokenPage(
            request=R,
            attempt=self.life.attempt,
            choice=0,
            index=index,
            ids=tuple(ids),
            state=state,
            finish=finish,
        )
        return self.tell(PullAnswered(D1, page))

    @property
    def ids(self) -> list[int]:
        return [i for c in self.said if isinstance(c, Emit) for i in c.ids]


def placed(attempt: int, prefill: NodeRef | None, decode: NodeRef) -> Placed:
    chosen = CandidateEstimate(
        prefill=prefill.node if prefill else NodeId(""),
        decode=decode.node,
        hit_tokens=0,
        queue_ms=0,
        transfer_ms=0,
        prefill_ms=0,
        ttft_ms=0,
        tbt_ms=0,
    )
    return Placed(
        request=R,
        attempt=attempt,
        prefill=prefill,
        decode=decode,
        reuse=(),
        chosen=chosen,
        reason="",
    )


def prefill_done(attempt: int = 1, reused: int = 0) -> PrefillDone:
    return PrefillDone(
        request=R,
        attempt=attempt,
        prefill=P1,
        reused_tokens=reused,
        computed_tokens=0,
        messages=1,
        times=PrefillTimes(queue_ms=0, load_ms=0, compute_ms=0),
    )


def the(kind: type[T], commands: Sequence[Command]) -> T:
    (found,) = [c for c in commands if isinstance(c, kind)]
    return found


def kinds(commands: Sequence[Command]) -> list[type]:
    return [type(c) for c in commands]
