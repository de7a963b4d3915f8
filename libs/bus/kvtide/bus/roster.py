"""Who is there: beats and time in, joins and losses out. Pure.

A node is live from its first beat until it says goodbye, is silent for ``dead_after_s``,
hangs (it says that it works and its step counter stands still for ``hung_after_s``), or a
later life of it is heard. Epochs only grow: what an older life says is ignored, by
``is_current`` for all messages.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from kvtide.bus.codec import PROTOCOL
from kvtide.bus.messages import Beat, DecodeLoad, Goodbye, NodeState, PrefillLoad
from kvtide.kv import NodeId, NodeRef, Role

KNOWN_LIMIT = 16_384
"""Nodes whose newest epoch is remembered after they are gone."""


@dataclass(frozen=True, slots=True)
class RosterTimes:
    """When a node counts as dead, and as hung."""

    dead_after_s: float = 3.0
    hung_after_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Member:
    """A live node: its newest beat, and when that and its last step were heard."""

    beat: Beat
    heard_s: float
    stepped_s: float

    @property
    def ref(self) -> NodeRef:
        """The node's life."""
        return self.beat.node

    @property
    def node(self) -> NodeId:
        """The node's name."""
        return self.beat.node.node

    @property
    def ready(self) -> bool:
        """Whether it takes new work."""
        return self.beat.state is NodeState.READY

    @property
    def working(self) -> bool:
        """Whether its step counter ought to grow."""
        return any(
            isinstance(load, PrefillLoad | DecodeLoad) and load.running > 0
            for load in self.beat.load
        )


class GoneReason(StrEnum):
    """Why a node is live no more."""

    GOODBYE = "goodbye"
    SILENT = "silent"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Joined:
    """A life of a node is live: new, or heard again after a silence."""

    member: Member


@dataclass(frozen=True, slots=True)
class Changed:
    """A live node's beat says something new (``seq`` and ``steps`` apart)."""

    before: Member
    member: Member


@dataclass(frozen=True, slots=True)
class Restarted:
    """A live node was replaced by a later life: what ``before`` held is gone."""

    before: Member
    member: Member


@dataclass(frozen=True, slots=True)
class Gone:
    """The node is live no more. A silent or hung one may come back: ``Joined``."""

    member: Member
    reason: GoneReason


RosterEvent = Joined | Changed | Restarted | Gone


class Roster:
    """The live nodes. Not thread-safe: for one loop, or a simulation."""

    def __init__(self, times: RosterTimes | None = None) -> None:
        """Start with nobody."""
        self.times = times or RosterTimes()
        self._live: dict[NodeId, Member] = {}
        self._hung: OrderedDict[NodeId, Member] = OrderedDict()
        self._epochs: OrderedDict[NodeId, int] = OrderedDict()
        self._left: OrderedDict[NodeId, int] = OrderedDict()

    # ---- questions

    def get(self, node: NodeId) -> Member | None:
        """The live member of that name."""
        return self._live.get(node)

    def live(self, role: Role | None = None) -> tuple[Member, ...]:
        """All live members, or those with ``role``, by name."""
        found = (m for m in self._live.values() if role is None or role in m.beat.roles)
        return tuple(sorted(found, key=lambda m: m.node))

    def is_live(self, ref: NodeRef) -> bool:
        """Whether exactly this life is live."""
        member = self._live.get(ref.node)
        return member is not None and member.ref == ref

    def epoch(self, node: NodeId) -> int:
        """The newest epoch known of the node, live or not; 0 if none is."""
        return self._epochs.get(node, 0)

    def is_current(self, ref: NodeRef) -> bool:
        """Whether no later life of that node is known; learns of ``ref`` if later."""
        return self._learn(ref)

    # ---- events

    def beat(self, beat: Beat, now_s: float) -> list[RosterEvent]:
        """A sign of life was heard. Older lives, repeats and old beats do nothing."""
        ref = beat.node
        if beat.protocol != PROTOCOL or not self._learn(ref):
            return []
        if self._left.get(ref.node, 0) >= ref.epoch:
            return []
        before = self._live.get(ref.node)
        if before is not None and before.ref == ref:
            return self._again(before, beat, now_s)
        if before is None and not self._recovers(beat, now_s):
            return []
        member = Member(beat, now_s, now_s)
        self._live[ref.node] = member
        self._hung.pop(ref.node, None)
        return [Joined(member)] if before is None else [Restarted(before, member)]

    def goodbye(self, goodbye: Goodbye) -> list[RosterEvent]:
        """A node has ended by itself; later beats of that life are late ones."""
        ref = goodbye.node
        if not self._learn(ref):
            return []
        self._left[ref.node] = max(ref.epoch, self._left.get(ref.node, 0))
        self._left.move_to_end(ref.node)
        while len(self._left) > KNOWN_LIMIT:
            self._left.popitem(last=False)
        self._hung.pop(ref.node, None)
        return self._lose(ref.node, GoneReason.GOODBYE)

    def tick(self, now_s: float) -> list[RosterEvent]:
        """Time has passed: find the silent and the hung."""
        events: list[RosterEvent] = []
        for node, member in sorted(self._live.items()):
            if now_s - member.heard_s > self.times.dead_after_s:
                events += self._lose(node, GoneReason.SILENT)
            elif self._hangs(member, now_s):
                self._remember_hung(member)
                events += self._lose(node, GoneReason.HUNG)
        return events

    def grace(self, now_s: float) -> None:
        """We were deaf (cut off, or paused): count everybody's silence from now."""
        for node, member in self._live.items():
            self._live[node] = Member(member.beat, now_s, now_s)

    # ---- inside

    def _learn(self, ref: NodeRef) -> bool:
        known = self._epochs.get(ref.node, 0)
        if ref.epoch < known:
            return False
        if ref.epoch > known:
            self._epochs[ref.node] = ref.epoch
            self._epochs.move_to_end(ref.node)
            self._forget()
        return True

    def _forget(self) -> None:
        """Keep the memory of epochs bounded; live ones are never forgotten."""
        while len(self._epochs) > KNOWN_LIMIT:
            node = next((n for n in self._epochs if n not in self._live), None)
            if node is None:
                return
            del self._epochs[node]

    def _remember_hung(self, member: Member) -> None:
        """Bounded too: one that is forgotten joins once more before it is found."""
        self._hung[member.node] = member
        self._hung.move_to_end(member.node)
        while len(self._hung) > KNOWN_LIMIT:
            self._hung.popitem(last=False)

    def _again(self, before: Member, beat: Beat, now_s: float) -> list[RosterEvent]:
        if beat.seq <= before.beat.seq:
            return []
        moved = beat.steps != before.beat.steps or not before.working
        stepped_s = now_s if moved else before.stepped_s
        member = Member(beat, now_s, stepped_s)
        self._live[member.node] = member
        return [] if _says_same(before.beat, beat) else [Changed(before, member)]

    def _recovers(self, beat: Beat, now_s: float) -> bool:
        """Whether a node that hung is live again: it stepped, or has no work now."""
        hung = self._hung.get(beat.node.node)
        if hung is None or hung.ref != beat.node:
            return True
        fresh = Member(beat, now_s, now_s)
        newer = beat.seq > hung.beat.seq
        return newer and (beat.steps != hung.beat.steps or not fresh.working)

    def _hangs(self, member: Member, now_s: float) -> bool:
        still_s = now_s - member.stepped_s
        return member.working and still_s > self.times.hung_after_s

    def _lose(self, node: NodeId, reason: GoneReason) -> list[RosterEvent]:
        member = self._live.pop(node, None)
        return [] if member is None else [Gone(member, reason)]


def _says_same(one: Beat, other: Beat) -> bool:
    return (
        one.roles == other.roles
        and one.host == other.host
        and one.state == other.state
        and one.load == other.load
        and one.transfer == other.transfer
        and one.arenas == other.arenas
        and one.models == other.models
        and one.http == other.http
    )
