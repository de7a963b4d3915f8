"""Drives a store's machine as its shell would, and follows what it tells the others."""

from kvtide.bus.messages import (
    BlocksChanged,
    LeaseRelease,
    PutBegin,
    PutBlock,
    PutCommitted,
    PutGranted,
    SnapshotPage,
    SnapshotPull,
)
from kvtide.bus.messages.pool import CommitBlock, PutCommit
from kvtide.kv import (
    BlockKey,
    Lease,
    Located,
    NodeId,
    NodeRef,
    RequestId,
    SpaceTags,
)
from kvtide.store.events import (
    Command,
    Event,
    Gossip,
    Received,
    Reply,
    StoreAnswer,
    StoreRequest,
    Tick,
    Verified,
    Verify,
    WriteRows,
)
from kvtide.store.machine import StoreMachine, StoreRules
from kvtide.store.slabs import Back, always_backed

STORE = NodeRef(NodeId("store"), 7)
CONDUCTOR = NodeRef(NodeId("conductor"), 1)
WRITER = NodeRef(NodeId("writer"), 1)
HEADER_BYTES = 192


def tags(size: int) -> SpaceTags:
    return SpaceTags(0, size.to_bytes(16), bytes(16), bytes(16))


def lease_of(request: str = "r", owner: NodeRef = WRITER) -> Lease:
    return Lease(RequestId(request), 1, owner)


class StoreDriver:
    """A machine, its time, and what a follower and the catalog have heard."""

    def __init__(self, rules: StoreRules, back: Back = always_backed) -> None:
        super().__init__()
        self.machine = StoreMachine(STORE, rules, back=back)
        self.now_s = 100.0
        self.verifies: list[Verify] = []
        self.others: list[Command] = []
        self.gossip_seq = 0
        self.truth: dict[BlockKey, Located] = {}
        self.rows: dict[BlockKey, int] = {}
        self._token = 0
        self._put = 0

    def handle(self, event: Event) -> list[Reply]:
        """Give an event; obey all commands; the replies among them."""
        replies: list[Reply] = []
        for command in self.machine.handle(event, self.now_s):
            self.obey(command, replies)
        return replies

    def obey(self, command: Command, replies: list[Reply]) -> None:
        match command:
            case Reply():
                replies.append(command)
            case Verify():
                self.verifies.append(command)
            case Gossip(message):
                self._replay(message)
            case WriteRows(came, gone):
                for row in gone:
                    assert self.rows.pop(row.key) == row.generation
                for row in came:
                    assert row.located.key not in self.rows
                    self.rows[row.located.key] = row.located.slot.generation
            case _:
                self.others.append(command)

    def _replay(self, message: BlocksChanged) -> None:
        self.gossip_seq += 1
        assert message.seq == self.gossip_seq
        for dropped in message.dropped:
            assert self.truth.pop(dropped.key).slot.generation == dropped.generation
        for located in message.added:
            assert located.key not in self.truth
            self.truth[located.key] = located

    def ask(self, message: StoreRequest, sender: NodeRef) -> list[Reply]:
        self._token += 1
        return self.handle(Received(message, sender, self._token))

    def answer(self, message: StoreRequest, sender: NodeRef = WRITER) -> StoreAnswer:
        """The one answer that comes at once."""
        (reply,) = self.ask(message, sender)
        assert reply.token == self._token
        return reply.message

    def settle(self, *, good: bool = True) -> list[Reply]:
        """Have all slots verified that wait for it."""
        verifies, self.verifies = self.verifies, []
        return [
            reply
            for wanted in verifies
            for reply in self.handle(Verified(wanted.slot, wanted.generation, good))
        ]

    def wait(self, seconds: float) -> None:
        """Let time pass, with every tick that the machine needs."""
        end_s = self.now_s + seconds
        while (due_s := self.machine.wake_at_s(self.now_s)) <= end_s:
            self.now_s = max(self.now_s, due_s)
            self.handle(Tick())
        self.now_s = end_s

    # ---- the usual ways

    def put_begin(
        self,
        holder: Lease,
        blocks: list[BlockKey | None],
        *,
        size: int = 1000,
        put: int | None = None,
    ) -> PutBegin:
        self._put += 1
        return PutBegin(
            lease=holder,
            put=self._put if put is None else put,
            tags=tags(size),
            slot_bytes=size,
            header_bytes=HEADER_BYTES,
            blocks=tuple(PutBlock(key, 64) for key in blocks),
        )

    def grant(
        self, holder: Lease, blocks: list[BlockKey | None], *, size: int = 1000
    ) -> PutGranted:
        granted = self.answer(self.put_begin(holder, blocks, size=size), holder.owner)
        assert isinstance(granted, PutGranted)
        return granted

    def commit_all(
        self, holder: Lease, granted: PutGranted, *, good: bool = True
    ) -> tuple[str, ...]:
        """Commit all slots of a grant and have them verified."""
        blocks = tuple(
            CommitBlock(each.slot, each.slot.generation * 3)
            for each in granted.slots
            if each.slot is not None
        )
        replies = self.ask(PutCommit(lease=holder, blocks=blocks), holder.owner)
        replies += self.settle(good=good)
        (reply,) = replies
        assert isinstance(reply.message, PutCommitted)
        return reply.message.states

    def release(self, holder: Lease) -> None:
        self.answer(LeaseRelease(lease=holder), holder.owner)

    def store(self, *blocks: BlockKey, size: int = 1000) -> None:
        """Put, commit and let go of blocks, then tell everyone."""
        holder = lease_of("store")
        granted = self.grant(holder, list(blocks), size=size)
        self.commit_all(holder, granted)
        self.release(holder)
        self.wait(0.05)

    def pages(self) -> list[SnapshotPage]:
        """A whole snapshot."""
        after: BlockKey | None = None
        pages: list[SnapshotPage] = []
        while not pages or after is not None:
            page = self.answer(SnapshotPull(after=after, limit=99), CONDUCTOR)
            assert isinstance(page, SnapshotPage)
            pages.append(page)
            after = page.next_key
        return pages
