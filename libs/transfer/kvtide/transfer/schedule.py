"""Which rail carries which request, by expected finish time. Pure.

A rail is one way to the peer: a connection over one network card, or an RDMA device.
A request goes to the rail that is expected to finish it first:

    (bytes in flight + its own bytes) / measured bandwidth * penalty

A rail takes a few requests at a time; the rest waits here, so that late news still
counts. When that rail is full, the next best takes it if it is done before all that
waits would be. A failing rail is paused, longer each time; a slow one has a low bandwidth and
gets less. Rails of a lower tier are used only while all of the tiers above are paused.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

DEPTH = 4
BACKGROUND_DEPTH = 2
FIRST_GUESS_BYTES_S = 1e9
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 10.0
_SAMPLE_WEIGHT = 0.3
# too small to tell bandwidth from latency
_SMALLEST_SAMPLE_BYTES = 64 << 10
# an unused rail's bandwidth is believed twice as high after each of these
_FORGET_S = 5.0
_NO_TIER = 1 << 30
_NO_LIMIT = 1 << 62


class Job(Protocol):
    """What the schedule must know of a request."""

    @property
    def nbytes(self) -> int:
        """Bytes that it moves."""
        ...

    @property
    def urgency(self) -> int:
        """0 goes first."""
        ...

    @property
    def location(self) -> str:
        """Where its local memory lies ("cpu:0"), "" when that makes no difference."""
        ...

    @property
    def least_tier(self) -> int:
        """Rails of lower tiers do not reach what it is about."""
        ...


JobT = TypeVar("JobT", bound=Job)


@dataclass(slots=True)
class Rail:
    """One way to the peer, and what is known of it.

    ``penalties`` multiply its expected times, by the location of a request's memory
    (2.0: it is on another NUMA node); 1 for what is not in it. A request of more than
    ``most_bytes`` does not fit. A rail that is ``gone`` gets nothing any more.
    """

    name: str
    tier: int = 0
    penalties: Mapping[str, float] = field(default_factory=dict[str, float])
    most_bytes: int = _NO_LIMIT
    gone: bool = False
    bandwidth_bytes_s: float = FIRST_GUESS_BYTES_S
    in_flight: int = 0
    in_flight_bytes: int = 0
    moved_bytes: int = 0
    measured: bool = False
    failures: int = 0
    failures_in_a_row: int = 0
    paused_until_s: float = 0.0
    last_change_s: float = 0.0

    def usable(self, nbytes: int, now_s: float) -> bool:
        """Whether it may carry a request of this size now."""
        return (
            self.paused_until_s <= now_s and not self.gone and nbytes <= self.most_bytes
        )

    def believed_bytes_s(self, now_s: float, best_bytes_s: float) -> float:
        """The bandwidth to plan with: an old measurement of an idle rail fades."""
        if self.in_flight or self.bandwidth_bytes_s >= best_bytes_s:
            return self.bandwidth_bytes_s
        doublings = min(40.0, max(0.0, (now_s - self.last_change_s) / _FORGET_S))
        return min(best_bytes_s, self.bandwidth_bytes_s * 2.0**doublings)


class Schedule(Generic[JobT]):
    """See the module. Events in, assignments out."""

    def __init__(self, rails: Sequence[Rail]) -> None:
        """Start with nothing to do."""
        self.rails = list(rails)
        self._waiting: list[tuple[int, int, JobT]] = []
        self._waiting_bytes = 0
        self._count = 0

    def add(self, rail: Rail) -> int:
        """A way appears; its index. One of this name that is gone gives its place."""
        for index, each in enumerate(self.rails):
            if each.gone and each.name == rail.name and not each.in_flight:
                self.rails[index] = rail
                return index
        self.rails.append(rail)
        return len(self.rails) - 1

    def remove(self, name: str) -> int | None:
        """A way is gone: its index, if it was there. What is on it is still to end."""
        for index, rail in enumerate(self.rails):
            if rail.name == name and not rail.gone:
                rail.gone = True
                return index
        return None

    def put(self, job: JobT) -> None:
        """A request to be assigned."""
        self._count += 1
        self._waiting_bytes += job.nbytes
        heapq.heappush(self._waiting, (job.urgency, self._count, job))

    def assign(self, now_s: float) -> list[tuple[JobT, int]]:
        """Requests that go out now, each with the index of its rail."""
        assigned: list[tuple[JobT, int]] = []
        while self._waiting:
            urgency, _, job = self._waiting[0]
            depth = DEPTH if urgency == 0 else BACKGROUND_DEPTH
            index = self._choose(job, depth, now_s)
            if index is None:
                break
            heapq.heappop(self._waiting)
            self._waiting_bytes -= job.nbytes
            rail = self.rails[index]
            if rail.in_flight == 0:
                rail.last_change_s = now_s
            rail.in_flight += 1
            rail.in_flight_bytes += job.nbytes
            assigned.append((job, index))
        return assigned

    def assign_at_once(self, nbytes: int, urgency: int, now_s: float) -> int | None:
        """The rail for a job that need not wait: None if ``put`` should have it.

        For rails that are alike: where nothing waits and none has troubles.
        """
        if self._waiting:
            return None
        depth = BACKGROUND_DEPTH if urgency else DEPTH
        best, least_bytes = None, _NO_LIMIT
        for index, rail in enumerate(self.rails):
            if rail.gone:
                continue
            if rail.tier != self.rails[0].tier or rail.failures_in_a_row:
                return None
            # the first if it is idle: what was in use a moment ago is quicker
            room = depth if rail.measured else 1
            if rail.in_flight_bytes < least_bytes and rail.in_flight < room:
                best, least_bytes = index, rail.in_flight_bytes
        if best is not None:
            rail = self.rails[best]
            if rail.in_flight == 0:
                rail.last_change_s = now_s
            rail.in_flight += 1
            rail.in_flight_bytes += nbytes
        return best

    def finished(self, index: int, nbytes: int, now_s: float) -> bool:
        """A rail has moved a request; whether others wait."""
        rail = self.rails[index]
        rail.in_flight -= 1
        rail.in_flight_bytes -= nbytes
        rail.moved_bytes += nbytes
        rail.failures_in_a_row = 0
        rail.paused_until_s = 0.0
        seconds = now_s - rail.last_change_s
        if nbytes >= _SMALLEST_SAMPLE_BYTES and seconds > 0:
            sample = nbytes / seconds
            weight = _SAMPLE_WEIGHT if rail.measured else 1.0
            rail.bandwidth_bytes_s += weight * (sample - rail.bandwidth_bytes_s)
            rail.measured = True
        rail.last_change_s = now_s
        return bool(self._waiting)

    def failed(self, index: int, nbytes: int, now_s: float) -> None:
        """A request failed on a rail, by the rail's fault: it is paused."""
        rail = self._left(index, nbytes)
        rail.failures += 1
        # those that were in flight together fail together: one pause for all
        if now_s >= rail.paused_until_s:
            pause_s = FIRST_PAUSE_S * 2.0 ** min(rail.failures_in_a_row, 20)
            rail.paused_until_s = now_s + min(LONGEST_PAUSE_S, pause_s)
            rail.failures_in_a_row += 1
        rail.last_change_s = now_s

    def returned(self, index: int, nbytes: int) -> None:
        """A request came back from a rail through no fault of the rail."""
        self._left(index, nbytes)

    def take_out(self, unwanted: Callable[[JobT], bool]) -> list[JobT]:
        """Remove waiting requests."""
        out = [entry[2] for entry in self._waiting if unwanted(entry[2])]
        if out:
            kept = [entry for entry in self._waiting if not unwanted(entry[2])]
            self._waiting = kept
            self._waiting_bytes -= sum(job.nbytes for job in out)
            heapq.heapify(self._waiting)
        return out

    def wake_s(self, now_s: float) -> float | None:
        """When ``assign`` should be asked again, if requests wait for a pause's end."""
        if not self._waiting:
            return None
        ends = [
            rail.paused_until_s
            for rail in self.rails
            if rail.paused_until_s > now_s and not rail.gone
        ]
        return min(ends) if ends else None

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def _left(self, index: int, nbytes: int) -> Rail:
        rail = self.rails[index]
        rail.in_flight -= 1
        rail.in_flight_bytes -= nbytes
        return rail

    def _choose(self, job: JobT, depth: int, now_s: float) -> int | None:
        """The rail for the next request; None when it is better to wait."""
        nbytes, location = job.nbytes, job.location
        tier, best_bytes_s = self._best_tier(job, now_s)
        best = roomy = None
        best_s = roomy_s = math.inf
        for index, rail in enumerate(self.rails):
            if rail.tier != tier or not rail.usable(nbytes, now_s):
                continue
            rate = rail.believed_bytes_s(now_s, best_bytes_s)
            penalty = rail.penalties.get(location, 1.0)
            finish_s = (rail.in_flight_bytes + nbytes) / rate * penalty
            if finish_s < best_s:
                best, best_s = index, finish_s
            # one at a time until it has shown how fast it is
            room = depth if rail.measured else 1
            if rail.in_flight < room and finish_s < roomy_s:
                roomy, roomy_s = index, finish_s
        if roomy is None or best is None or roomy == best:
            return roomy
        # a slower rail helps only if it is done before the best would be with all
        rail = self.rails[best]
        rate = rail.believed_bytes_s(now_s, best_bytes_s)
        all_bytes = rail.in_flight_bytes + self._waiting_bytes
        penalty = rail.penalties.get(location, 1.0)
        return roomy if roomy_s <= all_bytes / rate * penalty else None

    def _best_tier(self, job: JobT, now_s: float) -> tuple[int, float]:
        """The best tier that has a usable rail, and the most that one of it moves."""
        tier, most_bytes_s = _NO_TIER, 0.0
        nbytes, least = job.nbytes, job.least_tier
        for rail in self.rails:
            if not least <= rail.tier <= tier or not rail.usable(nbytes, now_s):
                continue
            if rail.tier < tier:
                tier, most_bytes_s = rail.tier, 0.0
            most_bytes_s = max(most_bytes_s, rail.bandwidth_bytes_s)
        return tier, most_bytes_s
