"""Clients in virtual time: what they ask for, and what they get."""

from dataclasses import dataclass, field

from kvtide.bus.messages import SamplingSpec
from kvtide.gateway.errors import UnavailableError
from kvtide.gateway.life import (
    AnswerCommand,
    Began,
    Emit,
    Fail,
    Finish,
    NoText,
    RequestSpec,
)
from kvtide.gateway.session import Session
from kvtide.kv import RequestId, Role, TenantId
from kvtide.sim.cluster import Process, SimCluster
from kvtide.sim.engine import FACTS
from kvtide.sim.kernel import Life
from kvtide.sim.spaces import space_of


@dataclass(frozen=True, slots=True)
class Question:
    """A request that a client makes at ``at_s``, and may leave ``leaves_s`` later."""

    request: RequestId
    at_s: float
    gateway: int
    tenant: TenantId
    prompt: tuple[int, ...]
    sampling: SamplingSpec
    max_new_tokens: int
    leaves_s: float | None = None


@dataclass(slots=True)
class Answer:
    """What came of a question. ``ends`` should have one entry at the end.

    ``turned_away``: the gateway did not take it. ``life`` is that of its gateway.
    """

    question: Question
    life: Life | None = None
    ids: list[int] = field(default_factory=list[int])
    ends: list[Finish | Fail] = field(default_factory=list[Finish | Fail])
    faults: list[str] = field(default_factory=list[str])
    turned_away: bool = False
    left: bool = False

    @property
    def settled(self) -> bool:
        """Whether nothing more is to be expected."""
        if self.turned_away or self.left or self.ends:
            return True
        return self.life is not None and not self.life.alive

    def take(self, command: AnswerCommand) -> None:
        """A piece of the answer comes."""
        if self.left:
            return
        if self.ends:
            self.faults.append(f"{type(command).__name__} after the end")
        match command:
            case Began():
                pass
            case Emit(index, ids):
                if index != len(self.ids):
                    self.faults.append(f"tokens at {index} after {len(self.ids)}")
                self.ids.extend(ids)
            case Finish() | Fail():
                self.ends.append(command)


class Clients:
    """Asks all questions at their times; keeps all answers."""

    def __init__(self, cluster: SimCluster, questions: tuple[Question, ...]) -> None:
        """Nothing is asked before its time."""
        self._cluster = cluster
        self.answers = [Answer(question) for question in questions]
        for answer in self.answers:
            cluster.kernel.at(
                answer.question.at_s, lambda answer=answer: self._ask(answer)
            )

    @property
    def settled(self) -> bool:
        """Whether all questions are asked and answered."""
        return all(answer.settled for answer in self.answers)

    def _ask(self, answer: Answer) -> None:
        question = answer.question
        gateways = self._cluster.of(Role.GATEWAY)
        gateway = gateways[question.gateway % len(gateways)]
        if gateway.gateway is None or gateway.node is None:
            answer.turned_away = True
            return
        answer.life = gateway.life
        space = space_of(question.tenant, "")
        spec = RequestSpec(
            request=question.request,
            gateway=gateway.node.ref,
            tenant=question.tenant,
            salt="",
            model=FACTS.name,
            prompt=question.prompt,
            keys=space.chain(question.prompt),
            sampling=question.sampling,
            max_new_tokens=question.max_new_tokens,
            stop_token_ids=FACTS.eos_token_ids,
        )
        try:
            session = gateway.gateway.submit(spec, space, NoText(), answer.take)
        except UnavailableError:
            answer.turned_away = True
            return
        if question.leaves_s is not None:
            self._leave_later(answer, session, gateway, question.leaves_s)

    def _leave_later(
        self, answer: Answer, session: Session, gateway: Process, leaves_s: float
    ) -> None:
        def leave() -> None:
            if not answer.ends:
                answer.left = True
                session.leave()

        self._cluster.kernel.at(leaves_s, leave, gateway.life)
