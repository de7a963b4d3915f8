"""What a follower of block gossip does next. Pure.

A store numbers its changes. As long as number follows number they are applied; after a
gap, a restart or a join the store's state is pulled in pages by ascending key, each true
at the number that it is stamped with. Changes that come meanwhile are kept; when the last
page is in, all after the oldest page's number are applied. A store's beat says its newest
number, so that a lost last change is missed too.
"""

from dataclasses import dataclass, field

import blake3

from kvtide.bus.messages import BlocksChanged, Dropped, SnapshotPage, StoreLoad
from kvtide.bus.roster import Changed, Gone, Joined, Member, Restarted, RosterEvent
from kvtide.kv import BlockKey, Located, NodeId, NodeRef, Role


@dataclass(frozen=True, slots=True)
class FollowTimes:
    """Seconds and counts. ``straggler_s`` is how long a missing change may be late."""

    jitter_s: float = 0.2
    retry_s: float = 0.2
    retry_max_s: float = 5.0
    straggler_s: float = 1.0
    behind_s: float = 1.0
    page_limit: int = 2048
    pulls: int = 4
    kept_limit: int = 16_384


@dataclass(frozen=True, slots=True)
class Apply:
    """These copies came and went; drops before adds."""

    store: NodeRef
    added: tuple[Located, ...]
    dropped: tuple[Dropped, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing is known of the store any more."""

    store: NodeId


@dataclass(frozen=True, slots=True)
class Exact:
    """Whether all that the store has is known."""

    store: NodeId
    exact: bool


@dataclass(frozen=True, slots=True)
class Pull:
    """Ask the store for the page after ``after``; report with the same number."""

    number: int
    store: NodeRef
    after: BlockKey | None
    limit: int


FollowCommand = Apply | Forget | Exact | Pull


@dataclass(slots=True)
class _Snapshot:
    """A snapshot on its way in. ``seqs`` are the numbers of its pages so far."""

    not_before_s: float
    asked: int | None = None
    after: BlockKey | None = None
    seqs: list[int] = field(default_factory=list[int])
    complete_s: float | None = None


@dataclass(slots=True)
class _Store:
    """What is known of one life of a store."""

    ref: NodeRef
    next_seq: int = 0
    exact: bool = False
    kept: dict[int, BlocksChanged] = field(default_factory=dict[int, BlocksChanged])
    snapshot: _Snapshot | None = None
    said_seq: int = 0
    behind_s: float | None = None
    tries: int = 0


class BlockFollowing:
    """The pure part of a block follower; one for all stores.

    Every method returns what to do, in order.
    """

    def __init__(self, own: NodeId, times: FollowTimes | None = None) -> None:
        """``own`` only decides how long this follower waits before its pulls."""
        self._own = own
        self._times = times or FollowTimes()
        self._stores: dict[NodeId, _Store] = {}
        self._pulls: dict[int, NodeId] = {}
        self._pulled = 0

    def is_exact(self, store: NodeId) -> bool:
        """Whether all that the store has is known, as far as one can tell."""
        known = self._stores.get(store)
        return known is not None and known.exact

    @property
    def all_exact(self) -> bool:
        """Whether that holds for all live stores."""
        return all(store.exact for store in self._stores.values())

    # ---- events

    def member(self, event: RosterEvent, now_s: float) -> list[FollowCommand]:
        """A node came, changed or went; only stores matter."""
        member = event.member
        if Role.STORE not in member.beat.roles:
            return []
        match event:
            case Joined() | Restarted():
                commands = self._leave(member.node)
                return commands + self._join(member, now_s)
            case Gone():
                return self._leave(member.node)
            case Changed():
                self._said(member, now_s)
                return []

    def changed(self, change: BlocksChanged, now_s: float) -> list[FollowCommand]:
        """Gossip came. Of unknown or other lives, and repeats: nothing."""
        store = self._stores.get(change.store.node)
        if store is None or store.ref != change.store or change.seq < store.next_seq:
            return []
        if store.snapshot is not None:
            return self._keep(store, change, now_s)
        if change.seq == store.next_seq:
            store.next_seq += 1
            return [Apply(store.ref, change.added, change.dropped)]
        store.kept = {change.seq: change}
        return self._resync(store, now_s)

    def page(
        self, number: int, page: SnapshotPage, now_s: float
    ) -> list[FollowCommand]:
        """A page that was pulled is here."""
        store = self._asked(number)
        if store is None or store.snapshot is None:
            return []
        snapshot = store.snapshot
        after, upto = snapshot.after, page.next_key
        stuck = after is not None and upto is not None and upto <= after
        if page.store != store.ref or stuck:
            return self._again(store, now_s)
        commands: list[FollowCommand] = []
        if not snapshot.seqs:
            commands.append(Forget(store.ref.node))
        if page.located:
            commands.append(Apply(store.ref, page.located, ()))
        snapshot.seqs.append(page.seq)
        snapshot.after = upto
        if upto is not None:
            return commands + self._pull(store, snapshot)
        snapshot.complete_s = now_s
        return commands + self._finish(store, snapshot, now_s) + self._start(now_s)

    def failed(self, number: int, now_s: float) -> list[FollowCommand]:
        """A pull got no page: try again a little later."""
        store = self._asked(number)
        if store is None or store.snapshot is None:
            return []
        return self._again(store, now_s) + self._start(now_s)

    def lost(self, now_s: float) -> None:
        """Messages were dropped: believe the next beat at once."""
        for store in self._stores.values():
            store.behind_s = now_s - self._times.behind_s

    def tick(self, now_s: float) -> list[FollowCommand]:
        """Time has passed: start pulls, give up on late changes, notice lost ones."""
        commands: list[FollowCommand] = []
        for store in list(self._stores.values()):
            snapshot = store.snapshot
            if snapshot is None:
                commands += self._check_behind(store, now_s)
            elif (
                snapshot.complete_s is not None
                and now_s - snapshot.complete_s >= self._times.straggler_s
            ):
                commands += self._again(store, now_s)
        return commands + self._start(now_s)

    # ---- inside

    def _join(self, member: Member, now_s: float) -> list[FollowCommand]:
        store = _Store(member.ref)
        self._stores[member.node] = store
        self._said(member, now_s)
        return self._resync(store, now_s)

    def _leave(self, node: NodeId) -> list[FollowCommand]:
        store = self._stores.pop(node, None)
        if store is None:
            return []
        self._unask(store)
        return [Forget(node), Exact(node, exact=False)]

    def _said(self, member: Member, now_s: float) -> None:
        store = self._stores.get(member.node)
        if store is None or store.ref != member.ref:
            return
        for load in member.beat.load:
            if isinstance(load, StoreLoad):
                store.said_seq = max(store.said_seq, load.seq)
        if store.said_seq >= store.next_seq and store.behind_s is None:
            store.behind_s = now_s

    def _check_behind(self, store: _Store, now_s: float) -> list[FollowCommand]:
        """A change that its store spoke of long ago did not come: it never will."""
        if store.said_seq < store.next_seq:
            store.behind_s = None
            return []
        if store.behind_s is None:
            store.behind_s = now_s
        if now_s - store.behind_s < self._times.behind_s:
            return []
        return self._resync(store, now_s)

    def _resync(self, store: _Store, now_s: float) -> list[FollowCommand]:
        """Begin to pull, after a while that differs from follower to follower."""
        commands: list[FollowCommand] = []
        if store.exact:
            store.exact = False
            commands.append(Exact(store.ref.node, exact=False))
        store.behind_s = None
        wait_s = self._times.jitter_s * self._share(store)
        if store.tries:
            grown_s = self._times.retry_s * 2.0 ** min(store.tries - 1, 16)
            wait_s += min(grown_s, self._times.retry_max_s)
        store.snapshot = _Snapshot(not_before_s=now_s + wait_s)
        return commands + self._start(now_s)

    def _again(self, store: _Store, now_s: float) -> list[FollowCommand]:
        self._unask(store)
        store.tries += 1
        return self._resync(store, now_s)

    def _share(self, store: _Store) -> float:
        """From 0 to 1: where in the jitter this follower's pulls of that store lie."""
        text = f"{self._own}/{store.ref.node}/{store.ref.epoch}/{store.tries}"
        return blake3.blake3(text.encode()).digest()[0] / 255

    def _start(self, now_s: float) -> list[FollowCommand]:
        """Ask for the first page of those that may begin, few at a time."""
        commands: list[FollowCommand] = []
        for store in self._stores.values():
            snapshot = store.snapshot
            if len(self._pulls) >= self._times.pulls:
                break
            if (
                snapshot is not None
                and snapshot.asked is None
                and snapshot.complete_s is None
                and snapshot.not_before_s <= now_s
            ):
                commands += self._pull(store, snapshot)
        return commands

    def _pull(self, store: _Store, snapshot: _Snapshot) -> list[FollowCommand]:
        self._pulled += 1
        snapshot.asked = self._pulled
        self._pulls[self._pulled] = store.ref.node
        limit = self._times.page_limit
        return [Pull(self._pulled, store.ref, snapshot.after, limit)]

    def _asked(self, number: int) -> _Store | None:
        """The store whose page has that number, if it is still waited for."""
        node = self._pulls.pop(number, None)
        store = self._stores.get(node) if node is not None else None
        if store is None or store.snapshot is None or store.snapshot.asked != number:
            return None
        store.snapshot.asked = None
        return store

    def _unask(self, store: _Store) -> None:
        snapshot = store.snapshot
        if snapshot is not None and snapshot.asked is not None:
            self._pulls.pop(snapshot.asked, None)
            snapshot.asked = None

    def _keep(
        self, store: _Store, change: BlocksChanged, now_s: float
    ) -> list[FollowCommand]:
        snapshot = store.snapshot
        store.kept[change.seq] = change
        if len(store.kept) > self._times.kept_limit:
            store.kept = {}
            return self._again(store, now_s)
        if snapshot is not None and snapshot.complete_s is not None:
            return self._finish(store, snapshot, now_s)
        return []

    def _finish(
        self, store: _Store, snapshot: _Snapshot, now_s: float
    ) -> list[FollowCommand]:
        """All pages are here: apply what came meanwhile, unless some is missing."""
        oldest, newest = min(snapshot.seqs), max(snapshot.seqs)
        newest = max([newest, *store.kept])
        if any(seq not in store.kept for seq in range(oldest + 1, newest + 1)):
            # it may be late; ``tick`` gives up on it
            return []
        # pages that are newer than a change hold its outcome already; to repeat the
        # changes in order from the oldest page on ends in the same state
        changes = [store.kept[seq] for seq in range(oldest + 1, newest + 1)]
        commands: list[FollowCommand] = [
            Apply(store.ref, change.added, change.dropped) for change in changes
        ]
        store.snapshot = None
        store.kept = {}
        store.next_seq = newest + 1
        store.tries = 0
        store.exact = True
        store.behind_s = None if store.said_seq < store.next_seq else now_s
        return [*commands, Exact(store.ref.node, exact=True)]
