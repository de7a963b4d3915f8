"""The life of a request in a world that loses, repeats, delays and kills."""

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings, strategies as st
from tests.unit.gateway_story import PROMPT, SPACE, R, make_spec, placed

from kvtide.bus.messages import (
    DecodeFailed,
    DecodeWork,
    FinishReason,
    PrefillDone,
    PrefillFailed,
    PrefillTimes,
    PullState,
    RefuseCode,
    RejectCode,
    Rejected,
    TokenPage,
    Tokens,
    WorkAccepted,
    WorkRefused,
)
from kvtide.gateway.life import (
    AdmitAnswered,
    Began,
    CancelAcked,
    ClientGone,
    Command,
    Emit,
    Event,
    Fail,
    Finish,
    Life,
    LifeLimits,
    NodeGone,
    NodeJoined,
    NoText,
    PullAnswered,
    RecordEnded,
    SendAdmit,
    SendCancel,
    SendDecodeWork,
    SendPrefillWork,
    SendTokenAck,
    SendTokenPull,
    Stage,
    Submitted,
    Tick,
    WorkAnswered,
    WorkerSaid,
    WorkLost,
)
from kvtide.kv import NodeId, NodeRef

LIMITS = LifeLimits(deadline_s=60, admit_limit_s=15)
LOSSY_S = LIMITS.work_patience_s
LENGTH = 9
ANSWER = tuple(500 + i for i in range(LENGTH))


@dataclass
class Decoding:
    """What a decode worker does for one attempt; the answer is a pure function."""

    work: DecodeWork
    done: int
    cancelled: bool = False

    def page(self, worker: NodeRef, index: int) -> TokenPage:
        finished = self.done == LENGTH
        return TokenPage(
            request=R,
            attempt=self.work.attempt,
            choice=0,
            index=index,
            ids=ANSWER[index : self.done],
            state=PullState.FINISHED if finished else PullState.RUNNING,
            finish=FinishReason.STOP if finished else None,
        )


@dataclass
class World:
    """Everything around one life. ``flight`` are events that are on their way."""

    life: Life
    now_s: float = 0.0
    chaos_s: float = 0.0
    alive: dict[str, int] = field(
        default_factory=lambda: {f"{kind}{i}": 1 for kind in "pd" for i in range(3)}
    )
    flight: list[Event] = field(default_factory=list[Event])
    orders: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    decoding: dict[tuple[NodeRef, int], Decoding] = field(
        default_factory=dict[tuple[NodeRef, int], Decoding]
    )
    prefilling: set[tuple[NodeRef, int]] = field(
        default_factory=set[tuple[NodeRef, int]]
    )
    tombs: set[tuple[NodeRef, int]] = field(default_factory=set[tuple[NodeRef, int]])
    ids: list[int] = field(default_factory=list[int])
    ends: list[Command] = field(default_factory=list[Command])
    records: int = 0
    attempts: set[int] = field(default_factory=set[int])
    losses: int = 0
    gone: bool = False

    def tell(self, event: Event) -> None:
        for command in self.life.handle(event, self.now_s):
            self.obey(command)

    def obey(self, command: Command) -> None:
        match command:
            case Emit():
                assert not self.ends
                assert command.index == len(self.ids)
                self.ids += command.ids
                assert tuple(self.ids) == ANSWER[: len(self.ids)]
            case Finish() | Fail():
                self.ends.append(command)
            case RecordEnded():
                self.records += 1
            case SendAdmit():
                self.attempts.add(command.message.attempt)
                self.orders.append(lambda: self.admit(command))
            case SendPrefillWork() | SendDecodeWork():
                self.orders.append(lambda: self.work(command))
            case SendCancel():
                self.orders.append(lambda: self.cancel(command))
            case SendTokenPull():
                self.orders.append(lambda: self.pull(command))
            case SendTokenAck() | Began():
                pass

    def is_alive(self, worker: NodeRef) -> bool:
        return self.alive.get(worker.node) == worker.epoch

    def pick(self, kind: str, excluded: tuple[NodeId, ...]) -> NodeRef | None:
        live = [
            NodeRef(NodeId(n), e)
            for n, e in sorted(self.alive.items())
            if n.startswith(kind) and n not in excluded
        ]
        return live[0] if live else None

    def admit(self, command: SendAdmit) -> None:
        message = command.message
        decode = self.pick("d", message.excluded)
        prefill = self.pick("p", message.excluded)
        if decode is None:
            rejected = Rejected(
                request=R,
                attempt=message.attempt,
                code=RejectCode.NO_WORKERS,
                reason="all are left out",
            )
            self.flight.append(AdmitAnswered(rejected))
            return
        self.flight.append(AdmitAnswered(placed(message.attempt, prefill, decode)))

    def work(self, command: SendPrefillWork | SendDecodeWork) -> None:
        message, worker = command.message, command.worker
        stage = Stage.DECODE if isinstance(message, DecodeWork) else Stage.PREFILL
        if not self.is_alive(worker):
            self.flight.append(WorkLost(stage, worker, message.attempt, "gone"))
            return
        if (worker, message.attempt) in self.tombs:
            self.refuse(stage, worker, message.attempt)
            return
        if isinstance(message, DecodeWork):
            assert message.tokens == (*PROMPT, *ANSWER[: len(message.tokens) - 20])
            start = len(message.tokens) - len(PROMPT)
            self.decoding[worker, message.attempt] = Decoding(message, start)
        else:
            self.prefilling.add((worker, message.attempt))
        accepted = WorkAccepted(request=R, attempt=message.attempt, start_ms=0)
        self.flight.append(WorkAnswered(stage, worker, accepted))

    def cancel(self, command: SendCancel) -> None:
        worker, attempt = command.worker, command.message.attempt
        if not self.is_alive(worker):
            return
        self.tombs |= {(worker, a) for a in range(attempt + 1)}
        for (w, a), decoding in self.decoding.items():
            if w == worker and a <= attempt:
                decoding.cancelled = True
        self.prefilling -= {
            (w, a) for w, a in self.prefilling if w == worker and a <= attempt
        }
        self.flight.append(CancelAcked(command.stage, worker, attempt))

    def pull(self, command: SendTokenPull) -> None:
        worker, message = command.worker, command.message
        decoding = self.decoding.get((worker, message.attempt))
        if decoding is not None and self.is_alive(worker) and not decoding.cancelled:
            page = decoding.page(worker, message.index)
            self.flight.append(PullAnswered(worker, page))

    def decode_step(self, choice: int, size: int) -> None:
        running = [
            (worker, d)
            for (worker, _), d in self.decoding.items()
            if self.is_alive(worker) and not d.cancelled and d.done < LENGTH
        ]
        if not running:
            return
        worker, decoding = running[choice % len(running)]
        start = decoding.done
        decoding.done = min(LENGTH, start + size)
        finish = FinishReason.STOP if decoding.done == LENGTH else None
        tokens = Tokens(
            request=R,
            attempt=decoding.work.attempt,
            decode=worker,
            choice=0,
            index=start,
            ids=ANSWER[start : decoding.done],
            finish=finish,
        )
        self.flight.append(WorkerSaid(worker, tokens))

    def kill(self, choice: int) -> None:
        name = sorted(self.alive)[choice % len(self.alive)]
        old = NodeRef(NodeId(name), self.alive[name])
        self.alive[name] += 1
        self.flight += [NodeGone(old), NodeJoined(NodeRef(old.node, old.epoch + 1))]

    def fail(self, choice: int) -> None:
        """A worker gives up by itself, or refuses what it has not answered."""
        name = sorted(self.alive)[choice % len(self.alive)]
        worker = NodeRef(NodeId(name), self.alive[name])
        attempt = self.life.attempt
        self.tombs.add((worker, attempt))
        self.prefilling.discard((worker, attempt))
        self.decoding.pop((worker, attempt), None)
        if choice % 3 == 0:
            stage = Stage.PREFILL if name.startswith("p") else Stage.DECODE
            self.refuse(stage, worker, attempt)
        elif name.startswith("p"):
            failed = PrefillFailed(
                request=R, attempt=attempt, prefill=worker, code="x", reason=""
            )
            self.flight.append(WorkerSaid(worker, failed))
        else:
            failed = DecodeFailed(
                request=R, attempt=attempt, decode=worker, code="x", reason=""
            )
            self.flight.append(WorkerSaid(worker, failed))

    def refuse(self, stage: Stage, worker: NodeRef, attempt: int) -> None:
        refused = WorkRefused(
            request=R, attempt=attempt, code=RefuseCode.BUSY, reason=""
        )
        self.flight.append(WorkAnswered(stage, worker, refused))

    def prefill_done(self, choice: int) -> None:
        if self.prefilling:
            worker, attempt = sorted(self.prefilling)[choice % len(self.prefilling)]
            done = PrefillDone(
                request=R,
                attempt=attempt,
                prefill=worker,
                reused_tokens=0,
                computed_tokens=0,
                messages=0,
                times=PrefillTimes(queue_ms=0, load_ms=0, compute_ms=0),
            )
            self.flight.append(WorkerSaid(worker, done))

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.tell(Tick())

    def chaos(self, action: int, choice: int) -> None:
        """One of the things that can happen next, the faithful ones more often."""
        if action <= 3 and self.orders:
            self.orders.pop(choice % len(self.orders))()
        elif action <= 6 and self.flight:
            self.tell(self.flight.pop(choice % len(self.flight)))
        elif action == 7 and self.flight:
            self.tell(self.flight[choice % len(self.flight)])  # a repeat
        elif action == 8 and self.orders:
            self.orders[choice % len(self.orders)]()  # a repeat
        elif action == 9 and self.flight:
            self.flight.pop(choice % len(self.flight))  # a loss
        elif action == 10 and self.orders:
            self.orders.pop(choice % len(self.orders))
        elif action in (11, 12, 13):
            self.decode_step(choice, 1 + choice % 3)
        elif action == 14:
            self.prefill_done(choice)
        else:
            self.rare(action, choice)

    def rare(self, action: int, choice: int) -> None:
        self.losses += action in (15, 16)
        if action == 15:
            self.kill(choice)
        elif action == 16:
            self.fail(choice)
        elif action == 17 and choice < 8:
            self.gone = True
            self.tell(ClientGone())
        else:
            self.tick(choice / 40)

    def heal(self) -> None:
        """From here on everything arrives, in order, and workers work."""
        for _ in range(3000):
            while self.orders:
                self.orders.pop(0)()
            while self.flight:
                self.tell(self.flight.pop(0))
            if not self.life.answered:
                self.decode_step(0, 1)
            if self.life.over and not self.orders and not self.flight:
                return
            self.tick(0.1)
        raise AssertionError("the life does not end")


STEP = st.tuples(st.integers(0, 19), st.integers(0, 60))
STEPS = st.lists(STEP, max_size=30) | st.lists(STEP, min_size=60, max_size=150)


def live_through(steps: list[tuple[int, int]]) -> World:
    world = World(Life(make_spec(max_new_tokens=LENGTH + 3), SPACE, NoText(), LIMITS))
    world.tell(Submitted())
    for action, choice in steps:
        world.chaos(action, choice)
    world.chaos_s = world.now_s
    return world


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_every_life_ends_once_and_its_tokens_are_true(
    steps: list[tuple[int, int]],
) -> None:
    world = live_through(steps)
    world.heal()
    assert world.records == 1
    assert len(world.ends) <= 1
    assert world.attempts == set(range(1, len(world.attempts) + 1))
    match world.ends:
        case [Finish() as end]:
            assert tuple(world.ids) == ANSWER
            assert end.usage.output_tokens == LENGTH
        case [Fail()] | []:
            # lost and repeated messages break nothing, nor do fewer than three losses
            lost = world.losses >= LIMITS.placements
            assert lost or world.gone or world.chaos_s > LOSSY_S
            assert tuple(world.ids) == ANSWER[: len(world.ids)]
        case _:
            raise AssertionError(world.ends)


@settings(max_examples=80, deadline=None)
@given(STEPS)
def test_nothing_goes_on_at_a_worker_after_the_end(
    steps: list[tuple[int, int]],
) -> None:
    world = live_through(steps)
    world.heal()
    running = {
        key
        for key, decoding in world.decoding.items()
        if world.is_alive(key[0]) and not decoding.cancelled and decoding.done < LENGTH
    }
    assert running == set()
    assert world.life.owned() == []


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_waking_when_told_is_enough(steps: list[tuple[int, int]]) -> None:
    """A tick before ``wake_s`` never has an effect, so the shell need not poll."""
    world = live_through(steps)
    wake_s = world.life.wake_s
    if world.now_s < wake_s:
        world.now_s = min(wake_s - 1e-6, world.now_s + 1)
        assert world.life.handle(Tick(), world.now_s) == []


def test_the_world_can_finish_undisturbed() -> None:
    world = live_through([])
    world.heal()
    assert [type(end) for end in world.ends] == [Finish]
