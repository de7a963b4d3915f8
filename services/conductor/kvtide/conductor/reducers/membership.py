"""Who is there, and what they last said of themselves."""

from collections.abc import Collection
from dataclasses import dataclass

from kvtide.bus.messages import Beat, NodeState
from kvtide.kv import ModelFacts, NodeId, NodeRef, Role


@dataclass(frozen=True, slots=True)
class ModelWorkers:
    """The workers that are ready for one model, whose facts are equal at all of them."""

    facts: ModelFacts
    prefills: tuple[Beat, ...]
    decodes: tuple[Beat, ...]


class Membership:
    """The newest beat of each live node. A node that is gone is not in it."""

    def __init__(self) -> None:
        """Start with nobody."""
        self._beats: dict[NodeId, Beat] = {}

    def __len__(self) -> int:
        """Live nodes."""
        return len(self._beats)

    def seen(self, beat: Beat) -> Beat | None:
        """Take a beat; returns the one that it replaces. One of an older life is ignored."""
        before = self._beats.get(beat.node.node)
        if before is None or before.node.epoch <= beat.node.epoch:
            self._beats[beat.node.node] = beat
        return before

    def gone(self, ref: NodeRef) -> Beat | None:
        """Forget this life of a node; None if it is not the one that is known."""
        beat = self._beats.get(ref.node)
        if beat is None or beat.node != ref:
            return None
        return self._beats.pop(ref.node)

    def get(self, node: NodeId) -> Beat | None:
        """What a live node last said."""
        return self._beats.get(node)

    def is_live(self, ref: NodeRef) -> bool:
        """Whether exactly this life is live."""
        beat = self._beats.get(ref.node)
        return beat is not None and beat.node == ref

    def live(self, role: Role) -> tuple[Beat, ...]:
        """Nodes of a role, ready or not, by name."""
        beats = sorted(self._beats.items())
        return tuple(beat for _, beat in beats if role in beat.roles)

    def ready(self, role: Role, excluded: Collection[NodeId] = ()) -> tuple[Beat, ...]:
        """Nodes of a role that take new work, by name."""
        return tuple(
            beat
            for node, beat in sorted(self._beats.items())
            if role in beat.roles
            and beat.state is NodeState.READY
            and node not in excluded
        )

    def workers(self, model: str, excluded: Collection[NodeId]) -> ModelWorkers | None:
        """The ready workers for ``model``; None if no ready worker announces it.

        Should workers disagree on what the model is (a rolling change of weights), those
        of the facts that most of them announce are taken: KV never crosses the two.
        """
        votes: dict[ModelFacts, int] = {}
        for beat in self._beats.values():
            if beat.state is not NodeState.READY:
                continue
            for facts in beat.models:
                if facts.name == model:
                    votes[facts] = votes.get(facts, 0) + 1
        if not votes:
            return None
        chosen = max(votes, key=lambda facts: (votes[facts], facts.digest))
        return ModelWorkers(
            chosen,
            self._of(Role.PREFILL, chosen, excluded),
            self._of(Role.DECODE, chosen, excluded),
        )

    def _of(
        self, role: Role, facts: ModelFacts, excluded: Collection[NodeId]
    ) -> tuple[Beat, ...]:
        ready = self.ready(role, excluded)
        return tuple(beat for beat in ready if facts in beat.models)
