"""Who is there, and what they last said of themselves."""

from dataclasses import dataclass

from kvtide.bus.messages import Beat, NodeState
from kvtide.conductor.reducers.costs import class_of
from kvtide.kv import ModelFacts, NodeId, NodeRef, Role
from kvtide.kv.model import most_said

_MODELS_LIMIT = 256


@dataclass(frozen=True, slots=True)
class Line:
    """Who is ready for a model, by name, and its facts, equal at all of them.

    The same object as long as nothing of it changes.
    """

    facts: ModelFacts
    prefills: tuple[NodeId, ...]
    decodes: tuple[NodeId, ...]


class Membership:
    """The newest beat of each live node. A node that is gone is not in it."""

    def __init__(self) -> None:
        """Start with nobody."""
        self._beats: dict[NodeId, Beat] = {}
        self._lines: dict[tuple[str, str], Line | None] = {}
        self._roles: dict[Role, tuple[NodeId, ...]] = {}
        self._stores: dict[str, NodeId] | None = None
        self.version = 0
        """Changes whenever a node comes, goes, or changes what it offers."""

    def __len__(self) -> int:
        """Live nodes."""
        return len(self._beats)

    def seen(self, beat: Beat) -> Beat | None:
        """Take a beat; returns the one that it replaces. One of an older life is ignored."""
        before = self._beats.get(beat.node.node)
        if before is None or before.node.epoch <= beat.node.epoch:
            self._beats[beat.node.node] = beat
            if before is None or _offer(before) != _offer(beat):
                self._changed()
        return before

    def gone(self, ref: NodeRef) -> Beat | None:
        """Forget this life of a node; None if it is not the one that is known."""
        beat = self._beats.get(ref.node)
        if beat is None or beat.node != ref:
            return None
        self._changed()
        return self._beats.pop(ref.node)

    def _changed(self) -> None:
        self._lines.clear()
        self._roles.clear()
        self._stores = None
        self.version += 1

    def get(self, node: NodeId) -> Beat | None:
        """What a live node last said."""
        return self._beats.get(node)

    def of_class(self, name: str) -> tuple[Beat, ...]:
        """Live nodes of a class of workers."""
        return tuple(beat for beat in self._beats.values() if class_of(beat) == name)

    def is_live(self, ref: NodeRef) -> bool:
        """Whether exactly this life is live."""
        beat = self._beats.get(ref.node)
        return beat is not None and beat.node == ref

    def live(self, role: Role) -> tuple[Beat, ...]:
        """Nodes of a role, ready or not, by name."""
        names = self._roles.get(role)
        if names is None:
            beats = sorted(self._beats.items())
            names = tuple(node for node, beat in beats if role in beat.roles)
            self._roles[role] = names
        return tuple(self._beats[node] for node in names)

    def ready(self, role: Role) -> tuple[Beat, ...]:
        """Nodes of a role that take new work, by name."""
        live = self.live(role)
        return tuple(beat for beat in live if beat.state is NodeState.READY)

    def store_at(self, host: str) -> Beat | None:
        """A host's store that takes new work, the first by name if there are more."""
        if self._stores is None:
            ready = self.ready(Role.STORE)
            self._stores = {beat.host: beat.node.node for beat in reversed(ready)}
        node = self._stores.get(host) if host else None
        return self._beats[node] if node is not None else None

    def line(self, model: str, digest: str = "") -> Line | None:
        """The ready workers for ``model``; None if no ready worker announces it.

        With a ``digest``, those of that model alone: another one may have its name.

        Should workers disagree on what the model is (a rolling change of weights), those
        of the facts that most of them announce are taken: KV never crosses the two.
        """
        named = model, digest
        if named not in self._lines:
            # names come from clients: without this, a flood of them would stay
            if len(self._lines) >= _MODELS_LIMIT:
                self._lines.clear()
            self._lines[named] = self._line(model, digest)
        return self._lines[named]

    def _line(self, model: str, digest: str) -> Line | None:
        chosen = most_said(
            facts
            for beat in self._beats.values()
            if beat.state is NodeState.READY
            for facts in beat.models
            if facts.name == model and digest in ("", facts.digest)
        )
        if chosen is None:
            return None
        return Line(
            chosen, self._of(Role.PREFILL, chosen), self._of(Role.DECODE, chosen)
        )

    def _of(self, role: Role, facts: ModelFacts) -> tuple[NodeId, ...]:
        able = [beat for beat in self.ready(role) if facts in beat.models]
        if role is Role.PREFILL:
            # what is made there could not be pooled any more
            leaving = self._hosts_that_leave()
            able = [beat for beat in able if beat.host not in leaving] or able
        return tuple(beat.node.node for beat in able)

    def _hosts_that_leave(self) -> set[str]:
        """Hosts whose stores are all draining."""
        stores = self.live(Role.STORE)
        draining = {b.host for b in stores if b.state is NodeState.DRAINING}
        return draining - {b.host for b in stores if b.state is NodeState.READY}


def _offer(beat: Beat) -> tuple[object, ...]:
    """What decides whether a node is a candidate, and for what."""
    return beat.node, beat.roles, beat.state, beat.models, beat.host
