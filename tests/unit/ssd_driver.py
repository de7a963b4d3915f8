"""A store's machine with an SSD tier on real files, without threads or time of its own."""

import mmap
from pathlib import Path

from xxhash import xxh3_64_intdigest

from kvtide.bus.messages import (
    BlocksChanged,
    BlocksStaged,
    LeaseRelease,
    PutBegin,
    PutBlock,
    PutCommit,
    PutCommitted,
    PutGranted,
    StageBlocks,
)
from kvtide.bus.messages.pool import CommitBlock
from kvtide.kv import (
    BlockHeader,
    BlockKey,
    Layout,
    Lease,
    Located,
    NodeId,
    NodeRef,
    RequestId,
    SlotRef,
    SpaceTags,
    Tier,
    make_header,
)
from kvtide.runtime import SystemClock
from kvtide.store.events import (
    Command,
    Event,
    Gossip,
    Received,
    Reply,
    StoreAnswer,
    StoreRequest,
    Tick,
    Verify,
    WriteRows,
)
from kvtide.store.machine import StoreMachine, StoreRules
from kvtide.store.ssd.events import (
    CloseTier,
    MoveRecord,
    NoteDeleted,
    OpenTier,
    RecordDone,
    SsdEvent,
    Trouble,
    WriteRecord,
)
from kvtide.store.ssd.files import FileCommand, FilesSpec, TierFiles
from kvtide.store.ssd.segments import Place
from kvtide.store.verify import verify_slot

NODE = NodeId("store")
WORKER = NodeRef(NodeId("worker"), 1)


def layout_of(head_dim: int) -> Layout:
    return Layout(
        layers=1, kv_heads=1, head_dim=head_dim, kv_dtype="float32", block_tokens=16
    )


SMALL, LARGE = layout_of(2), layout_of(32)


def tags_of(tenant: int = 0) -> SpaceTags:
    return SpaceTags(0, b"m" * 16, b"l" * 16, bytes([tenant]) * 16)


def part_of(key: BlockKey, part: int, layout: Layout) -> bytes:
    """What the model computes for a part: other bytes for every key and part."""
    seed = bytes([*key, part])
    return (seed * (layout.part_bytes // len(seed) + 1))[: layout.part_bytes]


def image_of(
    key: BlockKey, layout: Layout, generation: int, tags: SpaceTags
) -> tuple[bytes, int]:
    """A block as its writer leaves it in a slot, and what its header hashes to."""
    parts = [part_of(key, part, layout) for part in range(layout.parts)]
    header = make_header(
        key=key,
        tags=tags,
        generation=generation,
        tokens=layout.block_tokens,
        part_xxh3=[xxh3_64_intdigest(part) for part in parts],
        layout=layout,
    ).encode(layout)
    return header + b"".join(parts), xxh3_64_intdigest(header)


def segment_file(path: Path, number: int) -> Path:
    return path / f"{number:016x}.seg"


class SsdDriver:
    """Obeys what the machine wants; operations of the device wait for ``step``."""

    def __init__(self, path: Path, rules: StoreRules) -> None:
        super().__init__()
        self.path = path
        self.rules = rules
        self.arena = memoryview(mmap.mmap(-1, rules.arena_bytes))
        self.epoch = 0
        self.now_s = 100.0
        self._token = 0
        self._put = 0
        self.start()

    # ---- lives

    def start(self) -> None:
        """A life begins on what is in the directory."""
        self.epoch += 1
        self.store = NodeRef(NODE, self.epoch)
        self.machine = StoreMachine(self.store, self.rules)
        self.files = self.make_files()
        self.pending: list[FileCommand] = []
        self.verifies: list[Verify] = []
        self.answers: dict[int, StoreAnswer] = {}
        self.truth: dict[tuple[BlockKey, Tier], Located] = {}
        self.rows: dict[tuple[BlockKey, Tier], int] = {}
        self.gossip_seq = 0
        self.handle(Tick())
        self.wait(0.05)

    def make_files(self) -> TierFiles:
        """What the life's commands are done by."""
        spec = FilesSpec(self.path, NODE, key_id=7)
        return TierFiles(spec, self.arena, SystemClock())

    def stop(self) -> None:
        """The life ends; what waits for the device is lost. Memory with it."""
        self.files.end_copies()
        self.files.close()
        self.arena[:] = b"\xee" * len(self.arena)

    def tear(self, command: WriteRecord | MoveRecord, written_bytes: int) -> None:
        """Leave behind what a write had done after so many bytes of its record."""
        self.files.do(command)
        place = command.place
        with segment_file(self.path, place.segment).open("r+b") as file:
            file.seek(place.offset + written_bytes)
            file.write(bytes(place.length - written_bytes))

    # ---- the machine

    def handle(self, event: Event) -> None:
        for command in self.machine.handle(event, self.now_s):
            self.obey(command)

    def obey(self, command: Command) -> None:
        match command:
            case Reply(token, message):
                assert token not in self.answers
                self.answers[token] = message
            case Gossip(message):
                self._replay(message)
            case Verify():
                self.verifies.append(command)
            case WriteRows(came, gone):
                for row in gone:
                    assert self.rows.pop((row.key, row.tier)) == row.generation
                for row in came:
                    at = (row.located.key, row.tier)
                    assert at not in self.rows
                    self.rows[at] = row.located.slot.generation
            case OpenTier():
                self.handle(self.files.open(self.handle))
            case CloseTier():
                self.files.close()
            case _:
                self.pending.append(command)  # type: ignore[arg-type] # no replicas here

    def _replay(self, message: BlocksChanged) -> None:
        self.gossip_seq += 1
        assert message.seq == self.gossip_seq
        for dropped in message.dropped:
            (at,) = [
                at
                for at, located in self.truth.items()
                if located.slot.generation == dropped.generation
            ]
            assert at[0] == dropped.key
            del self.truth[at]
        for located in message.added:
            at = (located.key, located.slot.tier)
            assert at not in self.truth
            self.truth[at] = located

    def step(self, place: int = 0) -> FileCommand:
        """Have one operation of the device done."""
        command = self.pending.pop(place)
        event = self._done(command)
        if event is not None:
            self.handle(event)
        return command

    def _done(self, command: FileCommand) -> SsdEvent | None:
        if isinstance(command, NoteDeleted):
            self.files.forget_key(command.deleted)
        return self.files.do(command)

    def fail(self, place: int, trouble: Trouble) -> None:
        """Have one operation fail, as the device would report it."""
        command = self.pending.pop(place)
        event: SsdEvent | None = None
        if hasattr(command, "number"):
            event = RecordDone(command.number, trouble, "made up")  # type: ignore[union-attr]
        else:
            event = self._done(command)
        if event is not None:
            self.handle(event)

    def settle(self) -> None:
        """Have all operations done, and all that follows from them, at this time."""
        while self.pending:
            self.step()

    def wait(self, seconds: float) -> None:
        """Let time pass, with every tick that the machine needs."""
        end_s = self.now_s + seconds
        while (due_s := self.machine.wake_at_s(self.now_s)) <= end_s:
            self.now_s = max(self.now_s, due_s)
            self.handle(Tick())
        self.now_s = end_s

    def quiet(self) -> None:
        """Run until nothing is left to do for the device."""
        for _ in range(200):
            self.settle()
            self.wait(0.05)
            if not self.pending:
                return
        raise AssertionError("the tier never comes to rest")

    # ---- what a worker does

    def ask(self, message: StoreRequest, sender: NodeRef = WORKER) -> int:
        self._token += 1
        wall_ms = int(SystemClock().wall() * 1000)
        self.handle(Received(message, sender, self._token, wall_ms))
        return self._token

    def begin(
        self,
        lease: Lease,
        keys: list[BlockKey],
        layout: Layout = SMALL,
        tenant: int = 0,
    ) -> PutGranted:
        self._put += 1
        begin = PutBegin(
            lease=lease,
            put=self._put,
            tags=tags_of(tenant),
            slot_bytes=layout.slot_bytes,
            header_bytes=layout.header_bytes,
            blocks=tuple(PutBlock(key, layout.block_tokens) for key in keys),
        )
        granted = self.answers.pop(self.ask(begin))
        assert isinstance(granted, PutGranted)
        return granted

    def write(
        self, key: BlockKey, slot: SlotRef, layout: Layout, tenant: int
    ) -> CommitBlock:
        image, xxh3 = image_of(key, layout, slot.generation, tags_of(tenant))
        self.arena[slot.offset : slot.offset + len(image)] = image
        return CommitBlock(slot, xxh3)

    def put(
        self, keys: list[BlockKey], layout: Layout = SMALL, tenant: int = 0
    ) -> None:
        """Begin, write, commit, release."""
        lease = lease_of(f"put-{self._put}")
        granted = self.begin(lease, keys, layout, tenant)
        blocks = tuple(
            self.write(key, each.slot, layout, tenant)
            for key, each in zip(keys, granted.slots, strict=True)
            if each.slot is not None
        )
        token = self.ask(PutCommit(lease=lease, blocks=blocks))
        self.verify()
        assert isinstance(self.answers.pop(token), PutCommitted)
        self.ask(LeaseRelease(lease=lease))

    def verify(self) -> None:
        verifies, self.verifies = self.verifies, []
        for wanted in verifies:
            self.handle(verify_slot(self.arena, wanted))

    def stage(self, lease: Lease, keys: list[BlockKey]) -> int:
        return self.ask(StageBlocks(lease=lease, keys=tuple(keys), wait_ms=1000))

    def staged(self, token: int) -> tuple[Located | None, ...]:
        """The answer, once all that it takes is done."""
        self.settle()
        if token not in self.answers:
            self.wait(2)
        answer = self.answers.pop(token)
        assert isinstance(answer, BlocksStaged)
        return answer.located

    def read(self, keys: list[BlockKey]) -> list[bool]:
        """Stage blocks, read them as a reader would, and let go; which were had."""
        lease = lease_of(f"read-{self._token}")
        there = self.staged(self.stage(lease, keys))
        had = [located is not None and self.holds(located) for located in there]
        self.ask(LeaseRelease(lease=lease))
        return had

    def holds(self, located: Located) -> bool:
        """Whether a reader finds the block in DRAM: if it does, it is the right one."""
        slot = located.slot
        assert slot.tier is Tier.DRAM
        image = bytes(self.arena[slot.offset : slot.offset + slot.length])
        layout = SMALL if slot.length == SMALL.slot_bytes else LARGE
        raw = image[: layout.header_bytes]
        if xxh3_64_intdigest(raw) != located.header_xxh3:
            return False
        header = BlockHeader.decode(raw)
        if header.key != located.key or header.generation != slot.generation:
            return False
        for number, part in enumerate(header.parts):
            data = image[part.offset : part.offset + part.length]
            if xxh3_64_intdigest(data) != part.xxh3:
                return False
            assert data == part_of(located.key, number, layout), "wrong bytes"
        return True

    # ---- what is on the disk

    def on_ssd(self, key: BlockKey) -> bool:
        return self.machine.ssd.find(key) is not None

    def place(self, key: BlockKey) -> Place:
        entries = self.machine.ssd.books.entries
        row = entries.find(key)
        assert row is not None
        return entries.place(row)

    def edit(self, place: Place, at: int, data: bytes) -> bytes:
        """Overwrite bytes of a record; what was there."""
        with segment_file(self.path, place.segment).open("r+b") as file:
            file.seek(place.offset + at)
            before = file.read(len(data))
            file.seek(place.offset + at)
            file.write(data)
        return before


def lease_of(request: str, owner: NodeRef = WORKER) -> Lease:
    return Lease(RequestId(request), 1, owner)


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))
