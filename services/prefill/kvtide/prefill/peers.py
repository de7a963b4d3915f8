"""What prefill workers elsewhere are computing, and what they are told of here. Pure."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvtide.bus.messages import MOST_MAKING, BlocksMade, BlocksMaking
from kvtide.kv import BlockKey, Located, NodeRef, RequestRef
from kvtide.prefill.events import Loaded
from kvtide.prefill.job import Job

KEPT = 1024
COPIES_KEPT = 4096

_Id = tuple[NodeRef, RequestRef]


@dataclass(slots=True)
class Peer:
    """A request elsewhere and the blocks that it is still making, or waits for."""

    ident: _Id
    keys: set[BlockKey]
    due_s: float
    waits: bool

    def shared(self, keys: Sequence[BlockKey]) -> int:
        """How many of these it makes."""
        return sum(key in self.keys for key in keys)


class Peers:
    """Bounded: of more requests than are kept the oldest are forgotten."""

    def __init__(self, kept: int = KEPT) -> None:
        """Nobody has said anything."""
        self._kept = kept
        self._peers: OrderedDict[_Id, Peer] = OrderedDict()
        self._by_key: defaultdict[BlockKey, dict[_Id, Peer]] = defaultdict(dict)
        self._copies: OrderedDict[BlockKey, Located] = OrderedDict()

    def __len__(self) -> int:
        """Requests that are known."""
        return len(self._peers)

    # what they say

    def making(self, said: BlocksMaking, now_s: float) -> None:
        """It replaces what was said of the request before."""
        ident = _ident(said)
        self._forget(ident)
        keys = said.keys[:MOST_MAKING]
        peer = Peer(ident, set(keys), now_s + said.left_ms / 1000, said.waits)
        self._peers[ident] = peer
        for key in keys:
            self._by_key[key][ident] = peer
        while len(self._peers) > self._kept:
            self._forget(next(iter(self._peers)))

    def made(self, said: BlocksMade) -> None:
        """These are made, or all is given up."""
        ident = _ident(said)
        self.found(said.located)
        if said.ended:
            self._forget(ident)
            return
        peer = self._peers.get(ident)
        for copy in said.located:
            if peer is not None and copy.key in peer.keys:
                peer.keys.discard(copy.key)
                self._drop(copy.key, ident)

    def found(self, copies: Iterable[Located]) -> None:
        """These are in the pool, whoever put them there."""
        for copy in copies:
            self._copies[copy.key] = copy
            self._copies.move_to_end(copy.key)
        while len(self._copies) > COPIES_KEPT:
            self._copies.popitem(last=False)

    def loaded(self, job: Job, loaded: Loaded) -> None:
        """A load has ended: the copy with which it broke off is not there any more."""
        if loaded.whole:
            return
        for copy in job.copies_from(loaded.first + loaded.blocks, 1):
            if self._copies.get(copy.key) == copy:
                del self._copies[copy.key]

    def gone(self, node: NodeRef) -> None:
        """This life of a worker makes nothing any more, nor does an older one.

        What a store had is gone with its life.
        """
        for ident in list(self._peers):
            if ident[0].ends_with(node):
                self._forget(ident)
        for key, copy in list(self._copies.items()):
            if copy.slot.owner.ends_with(node):
                del self._copies[key]

    # what follows for a job here

    @property
    def copies(self) -> Mapping[BlockKey, Located]:
        """What was made lately, which a placement may not have known of yet."""
        return self._copies

    def maker_of(self, key: BlockKey, mine: _Id) -> Peer | None:
        """Who will make this block before ``mine`` should: soonest, by what was said."""
        peers = self._by_key.get(key, {}).values()
        rank = _rank(mine)
        makers = [one for one in peers if not one.waits or _rank(one.ident) < rank]
        return min(makers, key=lambda peer: (peer.waits, peer.due_s), default=None)

    def _forget(self, ident: _Id) -> None:
        peer = self._peers.pop(ident, None)
        for key in () if peer is None else peer.keys:
            self._drop(key, ident)

    def _drop(self, key: BlockKey, ident: _Id) -> None:
        self._by_key[key].pop(ident, None)
        if not self._by_key[key]:
            del self._by_key[key]


def making(job: Job, me: NodeRef, left_ms: float, *, waits: bool) -> BlocksMaking:
    """What others are told when a job begins, or begins to wait."""
    first = max(job.first_block, len(job.reuse) if waits else 0)
    keys = job.work.keys[first : job.end // job.block_tokens] if waits else job.making
    return BlocksMaking(
        prefill=me,
        request=job.ref.request,
        attempt=job.ref.attempt,
        keys=keys[:MOST_MAKING],
        left_ms=left_ms,
        waits=waits,
    )


def made(
    job: Job, me: NodeRef, located: tuple[Located, ...] = (), *, ended: bool
) -> BlocksMade:
    """What others are told when blocks are in the pool, or no more will come."""
    return BlocksMade(
        prefill=me,
        request=job.ref.request,
        attempt=job.ref.attempt,
        located=located,
        ended=ended,
    )


def _rank(ident: _Id) -> tuple[str, int, str, int]:
    """The order in which those that wait inherit; all workers see the same."""
    node, ref = ident
    return node.node, node.epoch, ref.request, ref.attempt


def _ident(said: BlocksMaking | BlocksMade) -> _Id:
    return said.prefill, RequestRef(said.request, said.attempt)
