"""Who holds what: the leases of each owner, and what each of them keeps."""

from dataclasses import dataclass, field

from kvtide.bus.messages import Owned, PutGranted
from kvtide.kv import Lease, NodeId, NodeRef

MAX_REMEMBERED_PUTS = 64
MAX_KNOWN_NODES = 4096
ABSENCES = 2


@dataclass(slots=True)
class Held:
    """One lease. ``slots`` are those it writes, pins or keeps, with their generation.

    ``grants`` are answers to its latest puts, for repeats. ``duplicates`` are the
    generations of blocks that it wrote and that were here already. ``expired``: its owner was silent for too
    long; ``slots`` are then the quarantined ones, which the owner might still write.
    ``over``: it has ended, nothing may be held for it any more.
    """

    lease: Lease
    slots: dict[int, int] = field(default_factory=dict[int, int])
    grants: dict[int, PutGranted] = field(default_factory=dict[int, PutGranted])
    duplicates: set[int] = field(default_factory=set[int])
    absent: int = 0
    expired: bool = False
    over: bool = False

    def has(self, slot: int, generation: int) -> bool:
        """Whether the lease keeps this use of the slot."""
        return self.slots.get(slot) == generation

    def remember(self, granted: PutGranted) -> None:
        """Keep an answer; the oldest beyond the limit is forgotten."""
        self.grants[granted.put] = granted
        if len(self.grants) > MAX_REMEMBERED_PUTS:
            del self.grants[next(iter(self.grants))]


@dataclass(slots=True)
class Owner:
    """One life of a node that holds leases. ``unplugged``: its connection has ended."""

    heard_s: float
    leases: dict[Lease, Held] = field(default_factory=dict[Lease, Held])
    last_list: int = -1
    unplugged: bool = False


class LeaseBook:
    """All leases by owner, and which lives of which nodes are over."""

    def __init__(self) -> None:
        """Nobody holds anything."""
        self._owners: dict[NodeRef, Owner] = {}
        self._over: dict[NodeId, int] = {}

    def __len__(self) -> int:
        """Leases that are held."""
        return sum(len(owner.leases) for owner in self._owners.values())

    def is_over(self, owner: NodeRef) -> bool:
        """Whether this life of a node is known to have ended."""
        return owner.epoch <= self._over.get(owner.node, -1)

    def end_life(self, owner: NodeRef) -> list[Held]:
        """This and earlier lives of the node are over; what they held."""
        self._over[owner.node] = max(self._over.pop(owner.node, -1), owner.epoch)
        if len(self._over) > MAX_KNOWN_NODES:
            del self._over[next(iter(self._over))]
        ended = [ref for ref in self._owners if ref.ends_with(owner)]
        return [held for ref in ended for held in self._owners.pop(ref).leases.values()]

    def revive(self, owner: NodeRef) -> None:
        """The roster sees a life again that it had given up."""
        if self._over.get(owner.node) == owner.epoch:
            self._over[owner.node] = owner.epoch - 1

    def lives(self, ref: NodeRef) -> list[Owner]:
        """This life of a node and those that the same process had after it."""
        return [
            owner
            for known, owner in self._owners.items()
            if known.node == ref.node and known.epoch >= ref.epoch
        ]

    def heard(self, ref: NodeRef, now_s: float) -> Owner:
        """Note a sign of life."""
        owner = self._owners.get(ref)
        if owner is None:
            owner = self._owners[ref] = Owner(now_s)
        owner.heard_s = now_s
        return owner

    def grace(self, now_s: float) -> None:
        """Start every owner's silence anew."""
        for owner in self._owners.values():
            owner.heard_s = now_s

    def take_list(self, listed: Owned) -> list[Held]:
        """Take out what the owner's full list omits for the second time running."""
        owner = self._owners.get(listed.owner)
        if owner is None or listed.seq <= owner.last_list:
            return []
        owner.last_list = listed.seq
        requests = {(ref.request, ref.attempt) for ref in listed.requests}
        ended: list[Held] = []
        for held in owner.leases.values():
            present = (held.lease.request, held.lease.attempt) in requests
            held.absent = 0 if present else held.absent + 1
            if held.absent >= ABSENCES:
                ended.append(held)
        for held in ended:
            del owner.leases[held.lease]
        return ended

    def silent(self, since_s: float) -> list[tuple[Owner, Held]]:
        """Leases, not yet expired, of owners last heard of before ``since_s``."""
        found: list[tuple[Owner, Held]] = []
        for ref, owner in list(self._owners.items()):
            if owner.heard_s >= since_s:
                continue
            if not owner.leases:
                del self._owners[ref]
            found.extend(
                (owner, held) for held in owner.leases.values() if not held.expired
            )
        return found
