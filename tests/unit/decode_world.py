"""A pretended shell for the decode machine: carries commands out, checks each."""

from collections import Counter, defaultdict

from kvtide.bus.messages import (
    DecodeFailed,
    DecodeWork,
    HandoverPlan,
    HandoverSlot,
    HandoverState,
    PartsReady,
    PartSums,
    PrefillDone,
    PrefillTimes,
    SamplingSpec,
    TokenAck,
    TokenPage,
    TokenPull,
    Tokens,
)
from kvtide.decode import events
from kvtide.decode.batcher import DecodeMachine
from kvtide.decode.limits import DecodeLimits
from kvtide.kv import (
    BlockKey,
    Located,
    NodeId,
    NodeRef,
    RequestId,
    RequestRef,
    SlotRef,
    TenantId,
    Tier,
)

ME = NodeRef(NodeId("d"), 1)
GATEWAY = NodeRef(NodeId("g"), 1)
PREFILL = NodeRef(NodeId("p"), 1)
BLOCK = 16
LAYERS = 2
EOS = 99
LIMITS = DecodeLimits(waiting=4, batch=3, fill_tokens=16, fill_alone_tokens=32)


def slot(number: int) -> SlotRef:
    return SlotRef(NodeId("s"), 1, Tier.DRAM, 0, number * 100, 100, 1)


def ref(name: str, attempt: int = 1) -> RequestRef:
    return RequestRef(RequestId(name), attempt)


class CountedKeys:
    """Keys that show which tokens they stand for."""

    def key(self, parent: BlockKey | None, tokens: list[int]) -> BlockKey:
        assert len(tokens) == BLOCK
        return BlockKey((parent or b"") + bytes(tokens[:1]))


def work(
    name: str,
    tokens: int,
    *,
    attempt: int = 1,
    reuse: int = 0,
    prefill: NodeRef | None = PREFILL,
    max_new_tokens: int = 4,
    prompt_tokens: int | None = None,
    min_new_tokens: int = 0,
    ignore_eos: bool = False,
) -> DecodeWork:
    keys = tuple(BlockKey(bytes([i]) * 16) for i in range(tokens // BLOCK))
    return DecodeWork(
        request=RequestId(name),
        attempt=attempt,
        gateway=GATEWAY,
        tenant=TenantId("t"),
        salt="",
        model="m",
        tokens=tuple(i % 90 for i in range(tokens)),
        prompt_tokens=prompt_tokens or tokens,
        keys=keys,
        reuse=tuple(Located(key, slot(i), i) for i, key in enumerate(keys[:reuse])),
        prefill=prefill,
        sampling=SamplingSpec(temperature=0),
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        ignore_eos=ignore_eos,
        deadline_ms=60_000,
    )


def plan(name: str, tokens: int, *, first: int = 0, attempt: int = 1) -> HandoverPlan:
    """Prefill's plan for a prompt of ``tokens`` tokens."""
    kv = tokens - 1
    blocks = range(first, -(-kv // BLOCK))
    return HandoverPlan(
        request=RequestId(name),
        attempt=attempt,
        prefill=PREFILL,
        first_block=first,
        slots=tuple(
            HandoverSlot(block, min(BLOCK, kv - block * BLOCK), slot(50 + block))
            for block in blocks
        ),
    )


def parts(
    planned: HandoverPlan, layer: int, seq: int, prefill: NodeRef = PREFILL
) -> PartsReady:
    """One layer of all planned blocks."""
    return PartsReady(
        request=planned.request,
        attempt=planned.attempt,
        prefill=prefill,
        seq=seq,
        parts=tuple(PartSums(one.block, layer, 1, 2) for one in planned.slots),
    )


def done(planned: HandoverPlan, messages: int = LAYERS) -> PrefillDone:
    return PrefillDone(
        request=planned.request,
        attempt=planned.attempt,
        prefill=PREFILL,
        reused_tokens=planned.first_block * BLOCK,
        computed_tokens=sum(one.tokens for one in planned.slots),
        messages=messages,
        times=PrefillTimes(queue_ms=0, load_ms=0, compute_ms=0),
    )


def state(planned: HandoverPlan) -> HandoverState:
    """All that prefill would answer in the end."""
    return HandoverState(
        request=planned.request,
        attempt=planned.attempt,
        plan=planned,
        parts=tuple(
            PartSums(one.block, layer, 1, 2)
            for one in planned.slots
            for layer in range(LAYERS)
        ),
        done=done(planned),
        failed=None,
    )


class World:
    """Knows which KV each run holds, and refuses a row without its past."""

    def __init__(
        self, limits: DecodeLimits = LIMITS, capacity_tokens: int = 12 * BLOCK
    ) -> None:
        self.machine = DecodeMachine(ME, limits, lambda _: CountedKeys())
        self.capacity_pages = capacity_tokens // BLOCK
        self.now_s = 0.0
        self.opened: dict[RequestRef, int] = {}
        self.prompts: dict[RequestRef, DecodeWork] = {}
        self.kv: defaultdict[RequestRef, set[tuple[int, int]]] = defaultdict(set)
        self.reads: list[events.ReadCopies | events.ReadParts] = []
        self.finds: list[tuple[RequestRef, tuple[events.KeyedBlock, ...]]] = []
        self.asks: list[events.AskHandover] = []
        self.told: list[events.TellTaken] = []
        self.puts: dict[RequestRef, events.PutBlocks] = {}
        self.put_blocks: defaultdict[RequestRef, list[events.KeyedBlock]] = defaultdict(
            list
        )
        self.step: events.Step | None = None
        self.replies: list[object] = []
        self.tokens: defaultdict[RequestRef, list[int]] = defaultdict(list)
        self.events: list[Tokens] = []
        self.failed: list[DecodeFailed] = []
        self.ends: Counter[RequestRef] = Counter()
        self.next_token = 7
        self.tell(events.ModelLoaded("m", 200, BLOCK, LAYERS, (EOS,), capacity_tokens))
        self.tell(events.StoreAttached(attached=True))

    def tell(self, event: events.Event) -> None:
        for command in self.machine.handle(event, self.now_s):
            self._do(command)
        pages = self.machine.pages
        bound = sum(pages.of(one) for one in self.opened)
        assert pages.used == bound <= self.capacity_pages
        assert all(0 < pages.of(one) <= room for one, room in self.opened.items())

    def _do(self, command: events.Command) -> None:
        match command:
            case events.Reply(message):
                self.replies.append(message)
            case events.ToGateway(_, message):
                self._heard(message)
            case events.AskHandover():
                self.asks.append(command)
            case events.TellTaken():
                self.told.append(command)
            case events.Open(asked, one, capacity):
                assert one not in self.opened
                self.opened[one] = capacity // BLOCK
                self.prompts[one] = asked
                self.kv[one] = set()
            case _:
                self._do_held(command)

    def _do_held(self, command: events.Command) -> None:
        match command:
            case events.FindCopies(one, blocks):
                assert one in self.opened
                pooled = {block.key for block in self.put_blocks[one]}
                there = [block for block in blocks if block.key in pooled]
                self.finds.append((one, tuple(there)))
            case events.ReadCopies() | events.ReadParts():
                assert command.ref in self.opened
                self.reads.append(command)
            case events.Step(_, rows):
                assert self.step is None
                for row in rows:
                    self._check_row(row)
                self.step = command
            case events.PutBlocks(one, _, blocks):
                assert one not in self.puts
                for block in blocks:
                    assert self._has(one, (block.block + 1) * BLOCK)
                self.puts[one] = command
                self.put_blocks[one].extend(blocks)
            case events.Free(one):
                assert one not in self.puts
                assert self.step is None or one not in {
                    row.ref for row in self.step.rows
                }
                del self.opened[one]
                self.reads = [read for read in self.reads if read.ref != one]
            case _:
                raise AssertionError(command)

    def _check_row(self, row: events.Row) -> None:
        assert row.ref in self.opened
        assert row.tokens
        assert self._has(row.ref, row.start), "attention would read what is not there"
        assert row.start + len(row.tokens) <= self.machine.pages.of(row.ref) * BLOCK

    def _has(self, one: RequestRef, tokens: int) -> bool:
        wanted = {(at, layer) for at in range(tokens) for layer in range(LAYERS)}
        return wanted <= self.kv[one]

    def _heard(self, message: object) -> None:
        if isinstance(message, DecodeFailed):
            self.failed.append(message)
            self.ends[ref(message.request, message.attempt)] += 1
            return
        assert isinstance(message, Tokens)
        one = ref(message.request, message.attempt)
        self.events.append(message)
        first = self.prompts.get(one, None)
        base = len(first.tokens) - first.prompt_tokens if first else message.index
        assert message.index == base + len(self.tokens[one]), "a gap or a repeat"
        self.tokens[one].extend(message.ids)
        self.ends[one] += message.finish is not None

    def say(self, message: HandoverPlan | PartsReady | PrefillDone) -> None:
        self.tell(events.HandoverSaid(message))

    def read_next(self, *, missed: int = 0) -> None:
        """End the oldest read; the last ``missed`` of it fail."""
        read = self.reads.pop(0)
        if isinstance(read, events.ReadCopies):
            blocks = tuple(copy.block for copy in read.copies)
            good = blocks[: max(0, len(blocks) - missed)]
            for block in good:
                for layer in range(LAYERS):
                    self._fill(read.ref, block * BLOCK, BLOCK, layer)
            self.tell(events.CopiesRead(read.ref, good, blocks[len(good) :]))
            return
        wanted = tuple(
            events.LayerPart(part.sums.block, part.sums.layer) for part in read.parts
        )
        kept = wanted[: max(0, len(wanted) - missed)]
        for part, one in zip(read.parts, kept, strict=False):
            self._fill(read.ref, one.block * BLOCK, part.tokens, one.layer)
        self.tell(events.PartsRead(read.ref, kept, wanted[len(kept) :]))

    def find_next(self) -> None:
        """End the oldest search: what was put is there."""
        one, blocks = self.finds.pop(0)
        copies = tuple(
            events.BlockCopy(block.block, Located(block.key, slot(80 + i), i))
            for i, block in enumerate(blocks)
        )
        self.tell(events.CopiesFound(one, copies))

    def _fill(self, one: RequestRef, start: int, count: int, layer: int) -> None:
        self.kv[one].update((at, layer) for at in range(start, start + count))

    def run_step(
        self, *, token: int | None = None, fail: bool = False, ms: float = 5.0
    ) -> events.Step:
        step = self.step
        assert step is not None
        self.step = None
        if fail:
            self.tell(
                events.StepEnded(step.step, events.StepOutcome.FAILED, 5, reason="x")
            )
            return step
        for row in step.rows:
            for layer in range(LAYERS):
                self._fill(row.ref, row.start, len(row.tokens), layer)
        drawn = tuple(
            events.Sampled(row.ref, self.next_token if token is None else token)
            for row in step.rows
            if row.sampling is not None
        )
        self.tell(events.StepEnded(step.step, events.StepOutcome.DONE, ms, drawn))
        return step

    def end_put(self, one: RequestRef) -> None:
        del self.puts[one]
        self.tell(events.BlocksPut(one))

    def run(self) -> None:
        """Carry everything out until nothing is under way; prefill answers nothing."""
        for _ in range(2000):
            if self.reads:
                self.read_next()
            elif self.finds:
                self.find_next()
            elif self.asks:
                self.tell(events.HandoverAnswered(self.asks.pop().ref, None))
                self.now_s += 1
                self.tell(events.Tick())
            elif self.puts:
                self.end_put(next(iter(self.puts)))
            elif self.step is not None:
                self.run_step()
            else:
                return
        raise AssertionError("it never ends")


def ack(name: str, index: int, *, finished: bool = True) -> events.AckArrived:
    return events.AckArrived(
        TokenAck(
            request=RequestId(name),
            attempt=1,
            choice=0,
            index=index,
            finished=finished,
        )
    )


def pull(world: World, name: str, index: int) -> TokenPage:
    asked = TokenPull(request=RequestId(name), attempt=1, choice=0, index=index)
    world.tell(events.PullArrived(asked))
    page = world.replies[-1]
    assert isinstance(page, TokenPage)
    return page
