"""Moves workers that can do both between prefill and decode, and says what is wanted.

The load of prefill is its mean queue over what a first token may take, that of decode
the larger of its mean share of memory in use and its mean pace over what a token may
take. When one load is well above the other and above ``busy``, and stays so, one worker
is told to change; it finishes first what it no longer does. Then both loads are watched
anew: one move at a time, and none for a while after it. The first conductor by name
moves; all say the same numbers, which an autoscaler can use.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from kvtide.bus.messages import Beat, ChangeRoles, DecodeLoad, NodeState, PrefillLoad
from kvtide.conductor.commands import TellWorker
from kvtide.conductor.reducers.membership import Membership
from kvtide.kv import NodeId, NodeRef, Role

_ROLES = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True)
class RoleRules:
    """When workers are moved.

    A load must be ``ratio`` times the other for ``hold_s`` on end; a move that isn't done
    after ``limit_s`` is given up, and is repeated each ``repeat_s`` until then.
    ``wanted_load`` is the load that the advice aims at; ``fade_s`` is how long a load is
    remembered.
    """

    enabled: bool = True
    ttft_ms: float = 5000.0
    tbt_ms: float = 200.0
    ratio: float = 2.0
    busy: float = 0.5
    hold_s: float = 10.0
    rest_s: float = 30.0
    limit_s: float = 300.0
    repeat_s: float = 5.0
    wanted_load: float = 0.7
    fade_s: float = 5.0


@dataclass(frozen=True, slots=True)
class RoleAdvice:
    """The load of a role, how many workers have it, and how many it would need."""

    role: Role
    load: float
    workers: int
    wanted: int


@dataclass(slots=True)
class _Move:
    worker: NodeRef
    inbox: Role
    roles: tuple[Role, ...]
    began_s: float
    told_s: float


class Roles:
    """See the module."""

    def __init__(self, members: Membership, rules: RoleRules | None = None) -> None:
        """``members`` is read only."""
        self._members = members
        self._rules = rules or RoleRules()
        self._both: dict[NodeId, NodeRef] = {}
        self._loads: dict[Role, float] = dict.fromkeys(_ROLES, 0.0)
        self._present: dict[Role, float] = dict.fromkeys(_ROLES, 0.0)
        self._at_s: float | None = None
        self._off: tuple[Role, float] | None = None
        self._rest_until_s = 0.0
        self._move: _Move | None = None

    @property
    def moving(self) -> NodeRef | None:
        """The worker that was told to change and hasn't yet."""
        return self._move.worker if self._move is not None else None

    def seen(self, beat: Beat) -> None:
        """Who once did both, or says that it could, can do both for its life.

        But for those that must do both.
        """
        if any(facts.self_contained for facts in beat.models):
            return
        if set(_ROLES) <= {*beat.roles, *beat.capable}:
            self._both[beat.node.node] = beat.node

    def gone(self, ref: NodeRef) -> None:
        """That life is over."""
        if self._both.get(ref.node) == ref:
            del self._both[ref.node]
        if self._move is not None and self._move.worker == ref:
            self._move = None

    def advice(self) -> tuple[RoleAdvice, ...]:
        """Both roles, as of the last tick."""
        return tuple(self._advice(role) for role in _ROLES)

    def tick(self, me: NodeRef, now_s: float) -> list[TellWorker]:
        """Time has passed; what to tell whom."""
        self._measure(now_s)
        if not self._rules.enabled or not self._leads(me):
            self._move = self._off = None
            return []
        if self._move is not None:
            return self._pursue(self._move, now_s)
        short = self._short()
        if short is None or now_s < self._rest_until_s:
            self._off = None
            return []
        if self._off is None or self._off[0] is not short:
            self._off = (short, now_s)
        if now_s - self._off[1] < self._rules.hold_s:
            return []
        return self._begin(short, now_s)

    # ---- inside

    def _leads(self, me: NodeRef) -> bool:
        conductors = self._members.live(Role.CONDUCTOR)
        return not conductors or conductors[0].node.node >= me.node

    def _measure(self, now_s: float) -> None:
        """Fold the present loads in; both fade with the time that has passed."""
        passed_s = now_s - self._at_s if self._at_s is not None else 0.0
        keep = 0.5 ** (max(0.0, passed_s) / self._rules.fade_s)
        if self._at_s is None:
            keep = 0.0
        self._at_s = now_s
        present = self._present = {
            Role.PREFILL: _mean(map(self._prefill_load, self._workers(Role.PREFILL))),
            Role.DECODE: _mean(map(self._decode_load, self._workers(Role.DECODE))),
        }
        for role, load in present.items():
            self._loads[role] = self._loads[role] * keep + load * (1 - keep)

    def _workers(self, role: Role) -> tuple[Beat, ...]:
        return self._members.ready(role)

    def _prefill_load(self, beat: Beat) -> float:
        loads = [load for load in beat.load if isinstance(load, PrefillLoad)]
        if not loads:
            return 0.0
        load = loads[0]
        queue_ms = max(0.0, load.queue_ms)
        if not queue_ms and load.tokens_per_s > 0:
            tokens = max(0, load.queued_tokens) + max(0, load.running_tokens_left)
            queue_ms = tokens / load.tokens_per_s * 1000
        return queue_ms / self._rules.ttft_ms

    def _decode_load(self, beat: Beat) -> float:
        loads = [load for load in beat.load if isinstance(load, DecodeLoad)]
        if not loads:
            return 0.0
        load = loads[0]
        kv_tokens = max(0, load.kv_tokens_used) + max(0, load.kv_tokens_promised)
        memory = (
            kv_tokens / load.kv_tokens_capacity if load.kv_tokens_capacity > 0 else 0
        )
        pace = max(0.0, load.step_ms) / self._rules.tbt_ms if load.running > 0 else 0.0
        return max(memory, pace)

    def _advice(self, role: Role) -> RoleAdvice:
        workers = len(self._workers(role))
        load = self._loads[role]
        wanted = max(1, ceil(workers * load / self._rules.wanted_load - 1e-9))
        return RoleAdvice(role, load, workers, wanted)

    def _short(self) -> Role | None:
        """The role that is and was overloaded while the other isn't and wasn't."""
        for role, other in (_ROLES, _ROLES[::-1]):
            if all(
                loads[role] > max(self._rules.busy, self._rules.ratio * loads[other])
                for loads in (self._loads, self._present)
            ):
                return role
        return None

    def _begin(self, short: Role, now_s: float) -> list[TellWorker]:
        other = _ROLES[1] if short is _ROLES[0] else _ROLES[0]
        workers = self._workers(other)
        givers = [
            beat
            for beat in workers
            if self._both.get(beat.node.node) == beat.node and _is_spare(beat, workers)
        ]
        if not givers:
            return []
        load = self._decode_load if other is Role.DECODE else self._prefill_load
        giver = min(givers, key=lambda beat: (load(beat), beat.node.node))
        self._off = None
        self._move = _Move(giver.node, other, (short,), now_s, now_s)
        return [self._tell(self._move)]

    def _pursue(self, move: _Move, now_s: float) -> list[TellWorker]:
        """Until its beats say that it has changed."""
        beat = self._members.get(move.worker.node)
        done = beat is not None and set(beat.roles) & set(_ROLES) == set(move.roles)
        changed = done and beat is not None and beat.state is NodeState.READY
        if changed or now_s - move.began_s > self._rules.limit_s:
            self._move = None
            self._rest_until_s = now_s + self._rules.rest_s
            return []
        if now_s - move.told_s < self._rules.repeat_s:
            return []
        move.told_s = now_s
        return [self._tell(move)]

    def _tell(self, move: _Move) -> TellWorker:
        message = ChangeRoles(worker=move.worker, roles=move.roles)
        return TellWorker(move.worker.node, move.inbox, message)


def _is_spare(beat: Beat, workers: Sequence[Beat]) -> bool:
    """Whether each of its models stays with another of ``workers``, and one stays at all."""
    others = [each for each in workers if each.node != beat.node]
    left = {facts for each in others for facts in each.models}
    return bool(others) and left.issuperset(beat.models)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
