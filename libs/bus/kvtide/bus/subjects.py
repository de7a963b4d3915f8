"""Where each kind of message goes. The only place that knows how subjects are spelt.

``kvtide.CLUSTER.beat.NODE`` and so on; a token never holds a dot, space or wildcard.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from kvtide.kv import NodeId, Role

_TOKEN = re.compile(r"[a-zA-Z0-9_-]+")


class Hop(StrEnum):
    """What an inbox is for. Each role listens on its own ones."""

    ADMIT = "admit"
    QUERY = "query"
    WORK = "work"
    CONTROL = "control"
    HANDOVER = "handover"
    TOKENS = "tokens"
    POOL = "pool"


HOPS: dict[Role, tuple[Hop, ...]] = {
    Role.GATEWAY: (Hop.TOKENS,),
    Role.CONDUCTOR: (Hop.ADMIT, Hop.QUERY),
    Role.PREFILL: (Hop.WORK, Hop.CONTROL),
    Role.DECODE: (Hop.WORK, Hop.CONTROL, Hop.HANDOVER),
    Role.STORE: (Hop.POOL, Hop.QUERY),
}
"""Which inboxes each role has."""


@dataclass(frozen=True, slots=True)
class Subjects:
    """The subjects of one cluster.

    Raises:
        ValueError: a name that does not fit a subject.
    """

    cluster: str

    def __post_init__(self) -> None:
        """Refuse a name that would change the subject's meaning."""
        _token(self.cluster)

    @property
    def prefix(self) -> str:
        """What all subjects of the cluster begin with."""
        return f"kvtide.{self.cluster}"

    def everything(self) -> str:
        """Every message of the cluster, replies too; for people who look on."""
        return f"{self.prefix}.>"

    def beat(self, node: NodeId) -> str:
        """Signs of life of one node."""
        return f"{self.prefix}.beat.{_token(node)}"

    def beats(self) -> str:
        """Signs of life of all nodes."""
        return f"{self.prefix}.beat.*"

    def goodbye(self, node: NodeId) -> str:
        """The last word of one node."""
        return f"{self.prefix}.goodbye.{_token(node)}"

    def goodbyes(self) -> str:
        """The last words of all nodes."""
        return f"{self.prefix}.goodbye.*"

    def inbox(self, role: Role, node: NodeId, hop: Hop | str) -> str:
        """What one role of one node is asked; ``hop`` as in ``HOPS``.

        Raises:
            ValueError: the role has no such inbox.
        """
        known = Hop(hop)
        if known not in HOPS[role]:
            message = f"{role} has no inbox {known}"
            raise ValueError(message)
        return f"{self.prefix}.inbox.{role}.{_token(node)}.{known}"

    def any_inbox(self, role: Role, hop: Hop) -> str:
        """That inbox of every node with the role."""
        return f"{self.prefix}.inbox.{role}.*.{hop}"

    def blocks(self, node: NodeId) -> str:
        """Which blocks came and went at one store."""
        return f"{self.prefix}.blocks.{_token(node)}"

    def all_blocks(self) -> str:
        """Which blocks came and went at all stores."""
        return f"{self.prefix}.blocks.*"

    def placements(self, node: NodeId) -> str:
        """What one conductor has placed."""
        return f"{self.prefix}.placements.{_token(node)}"

    def all_placements(self) -> str:
        """What all conductors have placed."""
        return f"{self.prefix}.placements.*"

    def making(self, node: NodeId) -> str:
        """What one prefill worker computes that others may wait for."""
        return f"{self.prefix}.making.{_token(node)}"

    def all_making(self) -> str:
        """What all prefill workers compute."""
        return f"{self.prefix}.making.*"

    def ended(self, node: NodeId) -> str:
        """Requests that ended at one gateway."""
        return f"{self.prefix}.ended.{_token(node)}"

    def all_ended(self) -> str:
        """Requests that ended at all gateways."""
        return f"{self.prefix}.ended.*"

    def replies(self, node: NodeId, inbox: str) -> str:
        """All replies to one process of a node; ``inbox`` is its own random token."""
        return f"{self.prefix}.reply.{_token(node)}.{_token(inbox)}.*"

    def all_replies(self, node: NodeId) -> str:
        """All replies to all processes of a node."""
        return f"{self.prefix}.reply.{_token(node)}.*.*"

    def reply(self, node: NodeId, inbox: str, number: int) -> str:
        """The reply to one request of one process."""
        return f"{self.prefix}.reply.{_token(node)}.{_token(inbox)}.{number}"


def matches(pattern: str, subject: str) -> bool:
    """Whether a subscription to ``pattern`` gets messages on ``subject``.

    ``*`` stands for one token, a last ``>`` for one or more.
    """
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(tokens) <= len(wanted):
            return False
    elif len(tokens) != len(wanted):
        return False
    return all(w in ("*", t) for w, t in zip(wanted, tokens, strict=False))


def _token(name: str) -> str:
    if not _TOKEN.fullmatch(name):
        message = (
            f"{name!r} can't be part of a subject: use letters, digits, '-' and '_'"
        )
        raise ValueError(message)
    return name
