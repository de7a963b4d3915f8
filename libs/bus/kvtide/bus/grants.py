"""What each node may say and hear on the bus: no more than its role needs. Pure.

A server that knows these grants refuses the rest: a store can't ask for a placement, a
worker hears neither another's work nor another's replies, nobody speaks under another
node's name. Replies need no grant: whoever was asked may answer, once.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvtide.bus.subjects import HOPS, Hop, Subjects
from kvtide.kv import NodeId, Role


@dataclass(frozen=True, slots=True)
class Grant:
    """Subjects, with wildcards, that may be published to and subscribed to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


_ASKED: dict[Role, tuple[tuple[Role, tuple[Hop, ...]], ...]] = {
    Role.GATEWAY: (
        (Role.CONDUCTOR, (Hop.ADMIT, Hop.QUERY)),
        (Role.PREFILL, (Hop.WORK, Hop.CONTROL)),
        (Role.DECODE, (Hop.WORK, Hop.CONTROL)),
        (Role.STORE, (Hop.QUERY,)),
    ),
    Role.CONDUCTOR: (
        (Role.CONDUCTOR, (Hop.ADMIT,)),
        (Role.PREFILL, (Hop.CONTROL,)),
        (Role.DECODE, (Hop.CONTROL,)),
        (Role.STORE, (Hop.QUERY,)),
    ),
    Role.PREFILL: (
        (Role.GATEWAY, (Hop.TOKENS,)),
        (Role.DECODE, (Hop.HANDOVER,)),
        (Role.STORE, (Hop.POOL, Hop.QUERY)),
    ),
    Role.DECODE: (
        (Role.GATEWAY, (Hop.TOKENS,)),
        (Role.PREFILL, (Hop.CONTROL,)),
        (Role.STORE, (Hop.POOL, Hop.QUERY)),
    ),
    Role.STORE: ((Role.STORE, (Hop.QUERY,)),),
}
"""Whose inboxes each role writes into."""


def grant_of(subjects: Subjects, node: NodeId, roles: Iterable[Role]) -> Grant:
    """What one node with these roles needs.

    Raises:
        ValueError: a name that does not fit a subject.
    """
    publish = [subjects.beat(node), subjects.goodbye(node)]
    subscribe = [subjects.beats(), subjects.goodbyes(), subjects.all_replies(node)]
    for role in roles:
        for asked, hops in _ASKED[role]:
            publish += [subjects.any_inbox(asked, hop) for hop in hops]
        subscribe += [subjects.inbox(role, node, hop) for hop in HOPS[role]]
        said, heard = _news(subjects, node, role)
        publish += said
        subscribe += heard
    return Grant(tuple(dict.fromkeys(publish)), tuple(dict.fromkeys(subscribe)))


def operator_grant(subjects: Subjects) -> Grant:
    """What commands of an operator need: everything of the cluster, and no more."""
    return Grant((subjects.everything(),), (subjects.everything(),))


def _news(
    subjects: Subjects, node: NodeId, role: Role
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a role tells all, and hears of all."""
    match role:
        case Role.GATEWAY:
            heard = (
                subjects.all_placements(),
                subjects.all_ended(),
                subjects.all_blocks(),
            )
            return (subjects.ended(node),), heard
        case Role.CONDUCTOR:
            heard = (
                subjects.all_placements(),
                subjects.all_ended(),
                subjects.all_blocks(),
            )
            return (subjects.placements(node),), heard
        case Role.PREFILL:
            return (subjects.making(node),), (subjects.all_making(),)
        case Role.DECODE:
            return (), ()
        case Role.STORE:
            return (subjects.blocks(node),), (subjects.all_placements(),)
