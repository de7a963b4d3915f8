"""The requests that are here, what each holds, and how that is let go. Pure."""

from kvtide.bus.ownership import Ownership
from kvtide.decode.events import (
    BlockCopy,
    Command,
    FindCopies,
    Free,
    Open,
    PutBlocks,
)
from kvtide.decode.limits import DecodeLimits
from kvtide.decode.pages import PageLedger
from kvtide.decode.sequence import Phase, Sequence
from kvtide.kv import NodeRef, RequestRef


class Holdings:
    """Sequences by request, their pages, their owners.

    ``Open`` and ``Free`` of a sequence pair up, and it has pages exactly between them:
    at first for what it has, more as its tokens come. When none are left, the youngest
    gives its own back, its blocks to the pool, and waits to begin again. Nothing is
    freed while the shell uses a run.
    """

    def __init__(self, limits: DecodeLimits) -> None:
        """Nobody is here, and there is no memory before the model is loaded."""
        self._limits = limits
        self.pages = PageLedger(0)
        self.owners = Ownership()
        self.attached = False
        self.layers = 0
        self.preempted = 0
        self.now_s = 0.0
        self.out: list[Command] = []
        self._sequences: dict[RequestRef, Sequence] = {}

    def __len__(self) -> int:
        """Requests that are known, ended ones that are not acknowledged included."""
        return len(self._sequences)

    def all(self) -> tuple[Sequence, ...]:
        """All, in the order in which they came."""
        return tuple(self._sequences.values())

    def in_phase(self, phase: Phase) -> list[Sequence]:
        """Those that stand there, in the order in which they came."""
        return [one for one in self._sequences.values() if one.phase is phase]

    def get(self, ref: RequestRef) -> Sequence | None:
        """One, also if only its memory is still to be freed."""
        return self._sequences.get(ref)

    def known(self, ref: RequestRef) -> Sequence | None:
        """One that its gateway may still speak of."""
        one = self._sequences.get(ref)
        return None if one is None or one.forgotten else one

    def take(self, one: Sequence, gateway: NodeRef) -> None:
        """A new one; an older attempt of the request is let go."""
        self.cancel(self.owners.held(one.ref.request))
        self.owners.hold(one.ref, gateway)
        self._sequences[one.ref] = one

    def bind(self, one: Sequence) -> bool:
        """Give it the pages that it needs to begin; whether they were there."""
        full = self.pages.holders >= self._limits.batch
        if full or not self.pages.bind(one.ref, one.first_pages(self._limits)):
            return False
        one.phase = Phase.PULLING
        one.opened = True
        one.bound_s = self.now_s
        one.handover.begin(self.now_s)
        one.arrival.offer(
            BlockCopy(block, located) for block, located in enumerate(one.work.reuse)
        )
        self.out.append(Open(one.work, one.ref, one.pages * one.block_tokens))
        if one.restarts and not one.finding:
            blocks = one.keyed_blocks()
            if blocks and self.attached:
                one.finding = True
                self.out.append(FindCopies(one.ref, blocks))
        return True

    def make_room(self) -> bool:
        """See that each that runs has a page for its next token; whether all have.

        The oldest come first. Where there is none, the youngest are preempted, for as
        many pages as are wanted; who waits for those pauses meanwhile.
        """
        lacking = 0
        for one in self.in_phase(Phase.RUNNING):
            one.starved = False
            while one.phase is Phase.RUNNING and not one.starved:
                if self.pages.grow(one.ref, one.next_pages):
                    break
                if self._coming() > lacking:
                    one.starved = True
                    lacking += 1
                else:
                    self.preempt(self._youngest())
        return lacking == 0

    def _coming(self) -> int:
        leaving = self.in_phase(Phase.PREEMPTED)
        return sum(self.pages.of(one.ref) for one in leaving)

    def _youngest(self) -> Sequence:
        able = (Phase.RUNNING, Phase.FILLING)
        return [one for one in self._sequences.values() if one.phase in able][-1]

    def preempt(self, one: Sequence) -> None:
        """Have it give its memory back as soon as its blocks are in the pool."""
        one.phase = Phase.PREEMPTED
        self.preempted += 1
        self.offer_blocks(one)
        self.leave(one)

    def put_ended(self, one: Sequence) -> None:
        """An offer to the pool has ended."""
        one.putting = False
        self.offer_blocks(one)
        if one.dying:
            self.let_go(one)
        else:
            self.leave(one)

    def leave(self, one: Sequence) -> None:
        """Give a preempted one's memory back, if nothing uses it any more."""
        if one.phase is Phase.PREEMPTED and not one.busy:
            self.pages.release(one.ref)
            self.out.append(Free(one.ref))
            one.restart(self.layers, self._limits)

    def cancel(self, ref: RequestRef | None) -> None:
        """Its owner wants it no more: let it go without a word."""
        one = None if ref is None else self._sequences.get(ref)
        if one is not None:
            self.owners.drop(one.ref, self.now_s, cancelled=True)
            self._abandon(one)

    def fenced(self) -> None:
        """All of it was another life's."""
        self.owners.fenced(self.now_s)
        for one in self.all():
            self._abandon(one)

    def acknowledged(self, one: Sequence) -> None:
        """It has ended, and nobody will ask for it again."""
        self.owners.drop(one.ref, self.now_s)
        one.forgotten = True
        self.let_go(one)

    def end(self, one: Sequence) -> None:
        """Nothing more is computed for it."""
        if one.phase is not Phase.ENDED:
            one.phase = Phase.ENDED
            one.ended_s = self.now_s

    def let_go(self, one: Sequence) -> None:
        """Free what it holds, or note that it is to be freed."""
        self.offer_blocks(one)
        if one.busy:
            one.dying = True
            return
        if one.opened:
            one.opened = False
            self.pages.release(one.ref)
            self.out.append(Free(one.ref))
        if one.forgotten:
            del self._sequences[one.ref]

    def offer_blocks(self, one: Sequence) -> None:
        """Offer what was computed here to the pool, one offer at a time."""
        wanted = one.opened and not one.abandoned and one.failed is None
        if not self.attached or not wanted or one.putting:
            return
        blocks = one.take_blocks(self._limits.put_blocks)
        if blocks:
            one.putting = True
            one.puts += 1
            self.out.append(PutBlocks(one.ref, one.puts, blocks))

    def _abandon(self, one: Sequence) -> None:
        one.abandoned = True
        one.forgotten = True
        self.end(one)
        self.let_go(one)
