"""A simulation from one number: what is asked, and what goes wrong when."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtide.bus import FaultyNetwork, NetworkFaults
from kvtide.bus.messages import SamplingSpec
from kvtide.kv import NodeId, RequestId, Role, TenantId
from kvtide.sim.checker import Violation, answer_violations, held, held_by_workers
from kvtide.sim.clients import Answer, Clients, Question
from kvtide.sim.cluster import Parts, Shape, SimCluster
from kvtide.sim.engine import FACTS, undisturbed

BOOT_S = 3.0
ANSWER_LIMIT_S = 60.0
WORKERS_LIMIT_S = 15.0
"""Within this time after the last answer owner lists have freed all at the workers."""
QUIET_LIMIT_S = 60.0
"""Within this time everything is over, bookings whose end was lost included."""
LOOK_EVERY_S = 0.5
STALL_S = 6.0
STALL_SEARCH_S = 5.0


@dataclass(frozen=True, slots=True)
class Trouble:
    """What may go wrong; the seed decides when, and to whom.

    ``crashes`` are of each role, ``pauses`` and ``cuts`` of any process, ``stalls``
    pauses of a prefill worker in the middle of a step. Everything
    happens within ``span_s`` of the first question, then all is well again.
    """

    faults: NetworkFaults = field(default_factory=NetworkFaults)
    crashes: int = 0
    pauses: int = 0
    stalls: int = 0
    cuts: int = 0
    leavers: float = 0.0
    span_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a simulation. ``violations`` must be empty.

    ``strays`` are writes into slots that somebody else had by then: by workers that
    were stopped, taken for dead, and woke. Readers must not believe them.
    """

    seed: int
    answers: list[Answer]
    violations: list[Violation]
    messages: int
    strays: int
    ended_s: float

    def summary(self) -> str:
        """For people who read a failure: the seed, then what is wrong."""
        lines = [f"seed {self.seed}:"]
        lines += [f"  {one.about}: {one.what}" for one in self.violations]
        return "\n".join(lines)


class Scenario:
    """One seeded simulation."""

    def __init__(
        self,
        seed: int,
        trouble: Trouble,
        *,
        questions: int = 10,
        shape: Shape | None = None,
        parts: Parts | None = None,
    ) -> None:
        """Draw everything from the seed; nothing runs yet."""
        self.seed = seed
        self._random = random.Random(seed)  # noqa: S311 - not for secrets
        self._trouble = trouble
        self._network = FaultyNetwork(self._random.getrandbits(64))
        self.cluster = SimCluster(self._network, shape, parts)
        self.clients = Clients(self.cluster, self._questions(questions))

    def run(self) -> Report:
        """Let it happen, and judge it."""
        cluster, kernel = self.cluster, self.cluster.kernel
        cluster.start_all()
        kernel.at(BOOT_S, self._begin_trouble)
        kernel.at(BOOT_S + self._trouble.span_s, self._end_trouble)
        kernel.run(BOOT_S + self._trouble.span_s)
        self._run_until(lambda: self.clients.settled, ANSWER_LIMIT_S)
        self._run_until(lambda: not held_by_workers(cluster), WORKERS_LIMIT_S)
        kept = held_by_workers(cluster)
        self._run_until(lambda: not held(cluster), QUIET_LIMIT_S)
        violations = [
            *answer_violations(self.clients.answers),
            *kept,
            *held(cluster),
            *(Violation("kernel", repr(error)) for error in kernel.failures),
        ]
        return Report(
            self.seed,
            self.clients.answers,
            violations,
            cluster.net.sent,
            cluster.memory.strays,
            kernel.now_s,
        )

    def _run_until(self, condition: Callable[[], bool], limit_s: float) -> None:
        kernel = self.cluster.kernel
        end_s = kernel.now_s + limit_s
        while kernel.now_s < end_s and not condition():
            kernel.run(LOOK_EVERY_S)

    # ---- what is asked

    def _questions(self, count: int) -> tuple[Question, ...]:
        """Prompts share beginnings, and some go on from an earlier answer."""
        draw = self._random
        made: list[Question] = []
        bases = [self._tokens(draw.randint(10, 70)) for _ in range(3)]
        for number in range(count):
            prompt = draw.choice(bases) + self._tokens(draw.randint(1, 30))
            tenant = TenantId(draw.choice(("tenant-a", "tenant-b")))
            if made and draw.random() < 0.4:  # noqa: PLR2004 - two in five
                before = draw.choice(made)
                tenant = before.tenant
                answer = undisturbed(
                    before.prompt, before.sampling, before.max_new_tokens
                )
                prompt = before.prompt + answer + self._tokens(draw.randint(1, 20))
            leaves = draw.random() < self._trouble.leavers
            made.append(
                Question(
                    request=RequestId(f"r{number}"),
                    at_s=BOOT_S + draw.uniform(0.0, self._trouble.span_s * 0.7),
                    gateway=draw.randrange(8),
                    tenant=tenant,
                    prompt=prompt[: FACTS.max_tokens // 2],
                    sampling=SamplingSpec(temperature=0.0, seed=draw.getrandbits(32)),
                    max_new_tokens=draw.randint(1, 40),
                    leaves_s=draw.uniform(0.0, 2.0) if leaves else None,
                )
            )
        return tuple(made)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(1, FACTS.vocab_size) for _ in range(count))

    # ---- what goes wrong

    def _begin_trouble(self) -> None:
        trouble, draw = self._trouble, self._random
        self._network.faults = trouble.faults
        for role in Role:
            for _ in range(trouble.crashes):
                self._crash_later(role)
        for _ in range(trouble.pauses):
            self._pause_later()
        for _ in range(trouble.stalls):
            self._stall_later(draw.uniform(0.0, trouble.span_s * 0.6))
        for _ in range(trouble.cuts):
            self._cut_later(draw.uniform(0.0, trouble.span_s * 0.7))

    def _end_trouble(self) -> None:
        self._network.faults = NetworkFaults()
        self._network.heal()

    def _crash_later(self, role: Role) -> None:
        process = self._random.choice(self.cluster.of(role))
        at_s = self._random.uniform(0.0, self._trouble.span_s * 0.6)
        back_s = at_s + self._random.choice((0.3, 1.0, 5.0))
        kernel = self.cluster.kernel

        def back() -> None:
            if not process.running:
                self.cluster.start(process)

        kernel.at(at_s, lambda: self.cluster.crash(process))
        kernel.at(back_s, back)

    def _pause_later(self) -> None:
        names = sorted(self.cluster.processes)
        process = self.cluster.processes[self._random.choice(names)]
        at_s = self._random.uniform(0.0, self._trouble.span_s * 0.6)
        seconds = self._random.choice((1.0, 4.0, 7.0))
        self.cluster.kernel.at(at_s, lambda: self.cluster.pause(process, seconds))

    def _stall_later(self, at_s: float) -> None:
        kernel = self.cluster.kernel
        kernel.at(at_s, lambda: self._stall(kernel.now_s + STALL_SEARCH_S))

    def _stall(self, end_s: float) -> None:
        """Stop the first prefill worker that is found computing."""
        kernel = self.cluster.kernel
        for process in self.cluster.of(Role.PREFILL):
            prefill = process.prefill
            if prefill is None or process.life.paused_until_s > kernel.now_s:
                continue
            if prefill.machine.load().running:
                self.cluster.pause(process, STALL_S)
                return
        if kernel.now_s < end_s:
            kernel.at(0.005, lambda: self._stall(end_s))

    def _cut_later(self, at_s: float) -> None:
        names = sorted(self.cluster.processes)
        left = self._random.sample(names, self._random.randint(1, 3))
        right = [name for name in names if name not in left]
        seconds = self._random.choice((0.5, 2.0, 6.0))
        kernel = self.cluster.kernel

        def cut(side: list[NodeId] = left, other: list[NodeId] = right) -> None:
            self._network.cut(side, other)

        kernel.at(at_s, cut)
        kernel.at(at_s + seconds, self._network.heal)
