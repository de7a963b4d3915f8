"""Who a worker holds requests for, and which messages come too late. Pure.

A receiver of work drops what is older than it knows: an older life of the sender, an
older attempt of the request, an attempt that was cancelled (also before it came) or
that has ended here. What it holds it frees when the owner says so, when the owner's list
misses it twice running, when the owner's life has ended, or when the owner has been
silent for very long.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from kvtide.kv import NodeId, NodeRef, RequestId, RequestRef


class Standing(StrEnum):
    """What a work message is to its receiver."""

    NEW = "new"
    HELD = "held"
    STALE = "stale"
    CANCELLED = "cancelled"
    FENCED = "fenced"


@dataclass(slots=True)
class _Past:
    """The greatest attempt that ended here, and how."""

    attempt: int
    cancelled: bool
    until_s: float


@dataclass(slots=True)
class _Owner:
    """What is known of one owner."""

    epoch: int
    heard_s: float
    seq: int = -1
    missed: set[RequestRef] = field(default_factory=set[RequestRef])


class Ownership:
    """The requests that are held, by owner, and the memory of those that were.

    At most one attempt of a request is held. The memory of ended attempts
    (tombstones) lasts ``memory_s`` and is bounded by ``memory_limit``, oldest out
    first. Never calls back: methods return what the caller must free, and the caller
    reports each end with ``drop``.
    """

    def __init__(
        self,
        *,
        memory_s: float = 60.0,
        memory_limit: int = 65_536,
        silence_s: float = 300.0,
    ) -> None:
        """``silence_s`` without a word of an owner frees what it has here."""
        self._memory_s = memory_s
        self._memory_limit = memory_limit
        self._silence_s = silence_s
        self._held: dict[RequestId, tuple[RequestRef, NodeRef]] = {}
        self._past: OrderedDict[RequestId, _Past] = OrderedDict()
        self._owners: dict[NodeId, _Owner] = {}

    def __len__(self) -> int:
        """Requests that are held."""
        return len(self._held)

    @property
    def tombstones(self) -> int:
        """Ended attempts that are remembered."""
        return len(self._past)

    def judge(self, ref: RequestRef, owner: NodeRef, now_s: float) -> Standing:
        """What a work message for ``ref`` from ``owner`` is; changes no holding.

        Held is only what this very owner sent before: the same attempt from another
        one is another request under a name that is taken, and comes too late.
        """
        if not self._hear(owner, now_s):
            return Standing.FENCED
        held = self._held.get(ref.request)
        if held is not None and ref.attempt <= held[0].attempt:
            return Standing.HELD if held == (ref, owner) else Standing.STALE
        past = self._past.get(ref.request)
        if past is not None and past.until_s > now_s and ref.attempt <= past.attempt:
            return Standing.CANCELLED if past.cancelled else Standing.STALE
        return Standing.NEW

    def held(self, request: RequestId) -> RequestRef | None:
        """The attempt of ``request`` that is held."""
        entry = self._held.get(request)
        return entry[0] if entry else None

    def hold(self, ref: RequestRef, owner: NodeRef) -> None:
        """Begin to hold ``ref``; an older attempt must have been dropped before.

        Raises:
            ValueError: another attempt of the request is held.
        """
        if ref.request in self._held:
            raise ValueError(f"request {ref.request} is held already")
        self._held[ref.request] = (ref, owner)

    def drop(self, ref: RequestRef, now_s: float, *, cancelled: bool = False) -> None:
        """``ref`` has ended here: hold it no longer and remember the attempt."""
        held = self._held.get(ref.request)
        if held is not None and held[0] == ref:
            del self._held[ref.request]
            owner = self._owners.get(held[1].node)
            if owner is not None:
                owner.missed.discard(ref)
        self._remember(ref, now_s, cancelled=cancelled)

    def cancel(self, ref: RequestRef, now_s: float) -> RequestRef | None:
        """Note a cancel of ``ref`` and all attempts before it; what to free."""
        self._remember(ref, now_s, cancelled=True)
        held = self._held.get(ref.request)
        if held is None or held[0].attempt > ref.attempt:
            return None
        return held[0]

    def listed(
        self, owner: NodeRef, seq: int, requests: Iterable[RequestRef], now_s: float
    ) -> list[RequestRef]:
        """The full list ``seq`` of ``owner``: what to free, absent twice running.

        An older list than one that was seen changes nothing.
        """
        if not self._hear(owner, now_s):
            return []
        known = self._owners[owner.node]
        if seq <= known.seq:
            return []
        known.seq = seq
        listed = set(requests)
        absent = {
            ref
            for ref, holder in self._held.values()
            if holder.node == owner.node and ref not in listed
        }
        freed = absent & known.missed
        freed |= {ref for ref in absent if self._held[ref.request][1] != owner}
        known.missed = absent - freed
        return sorted(freed, key=lambda ref: (ref.request, ref.attempt))

    def gone(self, owner: NodeRef) -> list[RequestRef]:
        """This life of a node has ended: what to free."""
        return [ref for ref, holder in self._held.values() if holder.ends_with(owner)]

    def expire(self, now_s: float) -> list[RequestRef]:
        """Forget old tombstones; what to free because its owner is silent."""
        while self._past:
            request, past = next(iter(self._past.items()))
            if past.until_s > now_s and len(self._past) <= self._memory_limit:
                break
            del self._past[request]
        silent = {
            node
            for node, owner in self._owners.items()
            if now_s - owner.heard_s > self._silence_s
        }
        freed = [ref for ref, owner in self._held.values() if owner.node in silent]
        busy = {owner.node for _, owner in self._held.values()}
        for node in silent - busy:
            del self._owners[node]
        return freed

    def fenced(self, now_s: float) -> None:
        """This process was fenced: nothing is held, and nothing of it comes again."""
        for ref, _ in list(self._held.values()):
            self.drop(ref, now_s)
        self._owners.clear()

    def _hear(self, owner: NodeRef, now_s: float) -> bool:
        known = self._owners.get(owner.node)
        if known is None or owner.epoch > known.epoch:
            missed = known.missed if known is not None else set[RequestRef]()
            self._owners[owner.node] = _Owner(owner.epoch, now_s, missed=missed)
            return True
        if owner.epoch < known.epoch:
            return False
        known.heard_s = now_s
        return True

    def _remember(self, ref: RequestRef, now_s: float, *, cancelled: bool) -> None:
        past = self._past.get(ref.request)
        if past is not None and (
            past.attempt > ref.attempt
            or (past.attempt == ref.attempt and past.cancelled)
        ):
            return
        self._past[ref.request] = _Past(ref.attempt, cancelled, now_s + self._memory_s)
        self._past.move_to_end(ref.request)
        while len(self._past) > self._memory_limit:
            self._past.popitem(last=False)
