"""One placement of a request: its two workers and how far each has come."""

from dataclasses import dataclass
from enum import Enum, auto

from kvtide.bus.messages import CandidateEstimate, Placed
from kvtide.gateway.life.events import Stage
from kvtide.kv import NodeRef


class WorkState(Enum):
    """``OVER``: the worker needs no cancel, it holds nothing more for the attempt."""

    SENT = auto()
    TAKEN = auto()
    OVER = auto()


@dataclass(slots=True)
class Work:
    """One worker's share of an attempt."""

    worker: NodeRef
    answer_by_s: float
    state: WorkState = WorkState.SENT


class Attempt:
    """An attempt from its first ``Admit`` on; ``placed`` gives it workers."""

    def __init__(self, number: int, now_s: float, admit_patience_s: float) -> None:
        """Start looking for a placement."""
        self.number = number
        self.rank = 0
        self.started_s = now_s
        self.next_rank_s = now_s + admit_patience_s
        self.works: dict[Stage, Work] = {}
        self.estimate: CandidateEstimate | None = None

    @property
    def is_placed(self) -> bool:
        """Whether a conductor has answered with workers."""
        return bool(self.works)

    def start_at(self, at_s: float) -> None:
        """Ask the first conductor only then."""
        self.rank = -1
        self.started_s = self.next_rank_s = at_s

    def hasten(self, at_s: float) -> None:
        """If the first conductor is still to be asked: ask it no later than then."""
        if self.rank < 0 and at_s < self.next_rank_s:
            self.started_s = self.next_rank_s = at_s

    def place(self, placed: Placed, answer_by_s: float) -> None:
        """Give both workers their share, to be answered by then."""
        self.estimate = placed.chosen
        self.works[Stage.DECODE] = Work(placed.decode, answer_by_s)
        if placed.prefill is not None:
            self.works[Stage.PREFILL] = Work(placed.prefill, answer_by_s)

    def of(self, stage: Stage, worker: NodeRef) -> Work | None:
        """The share of ``worker``, if this attempt gave it one."""
        work = self.works.get(stage)
        return work if work is not None and work.worker == worker else None

    def hit_by(self, gone: NodeRef) -> list[Stage]:
        """The stages whose worker died with this life of a node."""
        return [
            stage
            for stage, work in self.works.items()
            if work.state is not WorkState.OVER and work.worker.ends_with(gone)
        ]

    @property
    def is_taken(self) -> bool:
        """Whether every worker has answered, and none refused."""
        states = [work.state for work in self.works.values()]
        return bool(states) and WorkState.SENT not in states

    def unanswered(self, now_s: float) -> Stage | None:
        """A stage whose worker has not answered in time."""
        for stage, work in self.works.items():
            if work.state is WorkState.SENT and now_s >= work.answer_by_s:
                return stage
        return None

    @property
    def wake_s(self) -> float:
        """When an answer is overdue."""
        if not self.works:
            return self.next_rank_s
        return min(
            (w.answer_by_s for w in self.works.values() if w.state is WorkState.SENT),
            default=float("inf"),
        )

    def open_workers(self) -> list[tuple[Stage, NodeRef]]:
        """Workers that may hold something for this attempt."""
        return [
            (stage, work.worker)
            for stage, work in self.works.items()
            if work.state is not WorkState.OVER
        ]
