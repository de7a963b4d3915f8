"""A simulation from one number: what is asked, and what goes wrong when."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvtide.bus import FaultyNetwork
from kvtide.bus.messages import SamplingSpec
from kvtide.kv import RequestId, TenantId
from kvtide.sim.checker import (
    Violation,
    answer_violations,
    held,
    held_by_workers,
    unfinished,
)
from kvtide.sim.clients import Answer, Clients, Question
from kvtide.sim.cluster import Parts, Shape, SimCluster
from kvtide.sim.engine import FACTS, undisturbed
from kvtide.sim.mischief import Mischief, Trouble

QUESTIONS = 10
BOOT_S = 3.0
ANSWER_LIMIT_S = 60.0
WORKERS_LIMIT_S = 15.0
"""Within this time after the last answer owner lists have freed all at the workers."""
QUIET_LIMIT_S = 60.0
"""Within this time everything is over, bookings whose end was lost included."""
HEAL_LIMIT_S = 15.0
"""Within this time after that every index is true again, and nothing waits any more."""
LOOK_EVERY_S = 0.5


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
        questions: int = QUESTIONS,
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
        self._mischief = Mischief(trouble, self.cluster, self._network, self._random)

    def run(self) -> Report:
        """Let it happen, and judge it."""
        cluster, kernel = self.cluster, self.cluster.kernel
        cluster.start_all()
        kernel.at(BOOT_S, self._mischief.begin)
        kernel.at(BOOT_S + self._trouble.span_s, self._mischief.end)
        kernel.run(BOOT_S)
        tasks = {one.role: one.life.tasks for one in cluster.processes.values()}
        kernel.run(self._trouble.span_s)
        self._run_until(lambda: self.clients.settled, ANSWER_LIMIT_S)
        self._run_until(lambda: not held_by_workers(cluster), WORKERS_LIMIT_S)
        kept = held_by_workers(cluster)
        self._run_until(lambda: not held(cluster), QUIET_LIMIT_S)
        self._run_until(lambda: not unfinished(cluster, tasks), HEAL_LIMIT_S)
        violations = [
            *answer_violations(self.clients.answers),
            *kept,
            *held(cluster),
            *unfinished(cluster, tasks),
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
