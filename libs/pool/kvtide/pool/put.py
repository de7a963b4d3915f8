"""A put: slots of the local store that one writer fills and commits."""

import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from kvtide.bus.messages import BlockState, CommitBlock, PutBlock, PutSlot
from kvtide.kv import (
    PRIVATE_KEY,
    HeaderForm,
    Layout,
    Lease,
    Located,
    SlotRef,
    SpaceTags,
)
from kvtide.pool.errors import PutClosed

Commit = Callable[[tuple[CommitBlock, ...], float], Awaitable[Sequence[BlockState]]]


@dataclass(slots=True)
class _Filling:
    """One block under way: ``sums`` by part, None where nothing is written yet."""

    block: PutBlock
    sums: list[int | None]
    missing: int
    target: memoryview | None
    part_bytes: int
    committed: bool = False
    known: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class PutSpec:
    """What a put is about; ``existing`` holds the part sums of copies found here."""

    lease: Lease
    tags: SpaceTags
    layout: Layout
    blocks: Sequence[PutBlock]
    slots: tuple[PutSlot, ...]
    existing: Sequence[tuple[int, ...] | None]
    arenas: Sequence[memoryview] = field(repr=False)


class Put:
    """Made by ``PoolClient.begin``. ``write_part`` may be called from any thread.

    Attributes:
        lease: why the slots are held.
        slots: the store's answer for each block, in order.
    """

    def __init__(
        self,
        spec: PutSpec,
        commit: Commit,
        release: Callable[["Put"], Awaitable[None]],
        count_bytes: Callable[[float], None],
    ) -> None:
        """``release`` tells the client that this put has ended."""
        self.lease = spec.lease
        self.slots = spec.slots
        self._form = HeaderForm(spec.tags, spec.layout)
        self._commit = commit
        self._release = release
        self._count_bytes = count_bytes
        self._state = threading.Condition()
        self._writers = 0
        self._closed = ""
        self._stored: list[Located] = []
        # counted by the block: counting costs as much as copying a small part
        self._uncounted = 0
        parts, token_bytes = spec.layout.parts, spec.layout.token_bytes
        self._offsets = tuple(map(spec.layout.part_offset, range(parts)))
        self._blocks = [
            _Filling(
                block,
                [None] * parts,
                parts,
                _target(spec, slot),
                part_bytes=block.tokens * token_bytes,
                known=sums,
            )
            for block, slot, sums in zip(
                spec.blocks, spec.slots, spec.existing, strict=True
            )
        ]

    # ---- what each block has

    @property
    def closed(self) -> bool:
        """Whether its slots are not ours any more."""
        return bool(self._closed)

    def ref(self, i: int) -> SlotRef | None:
        """Where block ``i`` can be read until the release; None: there was no room."""
        answer = self.slots[i]
        if answer.slot is not None:
            return answer.slot
        return None if answer.existing is None else answer.existing.slot

    def writable(self, i: int) -> bool:
        """Whether there is a slot to write for block ``i``."""
        return self._blocks[i].target is not None

    def sums(self, i: int) -> tuple[int, ...] | None:
        """xxh3-64 of each part, when all are known: of what exists, at once."""
        return self._blocks[i].known

    @property
    def stored(self) -> tuple[Located, ...]:
        """The keyed blocks that this put has brought into the pool so far."""
        return tuple(self._stored)

    # ---- writing

    def write_part(self, i: int, part: int, data: memoryview) -> int:
        """Copy a part into its slot; its xxh3-64, over the caller's bytes.

        ``data`` is ``tokens * layout.token_bytes`` long. Each part once.

        Raises:
            PutClosed: the put has ended; stop pooling, that is all.
            ValueError: a wrong length, a part that does not exist or is written
                already, or a block without a slot.
        """
        return self.write_parts(i, part, (data,))[0]

    def write_parts(self, i: int, first: int, data: Sequence[memoryview]) -> list[int]:
        """As ``write_part``, for parts from ``first`` on: all or none of them count."""
        filling = self._blocks[i]
        length = filling.part_bytes
        for part, each in enumerate(data, first):
            if each.nbytes != length:
                raise ValueError(f"part {part} has {length} bytes, not {each.nbytes}")
        parts = range(first, first + len(data))
        target = self._enter(filling, i, parts)
        xxh3: list[int] = []
        try:
            for start, each in zip(self._offsets[first:], data, strict=False):
                plain = each.format == "B" and each.ndim == 1
                flat = each if plain else each.cast("B")
                xxh3.append(xxh3_64_intdigest(flat))
                target[start : start + length] = flat
        except BaseException:
            self._leave(filling, parts, ())
            raise
        written = self._leave(filling, parts, xxh3)
        if written:
            self._count_bytes(written)
        return xxh3

    def _enter(self, filling: _Filling, i: int, parts: range) -> memoryview:
        with self._state:
            if self._closed:
                raise PutClosed(f"the put has ended: {self._closed}")
            known = parts.start >= 0 and parts.stop <= len(filling.sums)
            if filling.target is None or not known:
                raise ValueError(f"block {i} has no slot for parts {parts}")
            sums = filling.sums
            if sums[parts.start : parts.stop].count(None) != len(parts):
                raise ValueError(
                    f"some of parts {parts} of block {i} are written already"
                )
            self._writers += 1
            return filling.target

    def _leave(self, filling: _Filling, parts: range, xxh3: Sequence[int]) -> int:
        """A write is over, without sums in vain; bytes to be counted now."""
        with self._state:
            self._writers -= 1
            if not self._writers:
                self._state.notify_all()
            if xxh3:
                at = slice(parts.start, parts.stop)
                sums = filling.sums
                filling.missing -= sums[at].count(None)
                sums[at] = xxh3
                self._uncounted += filling.part_bytes * len(parts)
                if filling.missing == 0:
                    filling.known = tuple(each for each in sums if each is not None)
            if filling.missing and not self._closed:
                return 0
            counted, self._uncounted = self._uncounted, 0
            return counted

    # ---- ends

    async def commit(self, *, timeout_s: float = 5.0) -> tuple[BlockState | None, ...]:
        """Offer all blocks that are written and were not yet; their states, in order.

        None where there is nothing to commit. May be called again as more is written.
        A stored keyed block stays pinned, a private one alive, until ``release``.

        Raises:
            PoolUnavailable: the store did not answer or is gone; go on without.
            PutClosed: the put has ended.
        """
        if self._closed:
            raise PutClosed(f"the put has ended: {self._closed}")
        states: list[BlockState | None] = [None] * len(self._blocks)
        offered: list[int] = []
        blocks: list[CommitBlock] = []
        for i, filling in enumerate(self._blocks):
            ref = self.slots[i].slot
            if filling.target is None or ref is None or filling.committed:
                continue
            if filling.known is None:
                continue
            offered.append(i)
            blocks.append(CommitBlock(ref, self._write_header(filling, ref)))
        if not blocks:
            return tuple(states)
        answers = await self._commit(tuple(blocks), timeout_s)
        for i, block, state in zip(offered, blocks, answers, strict=True):
            states[i] = state
            self._blocks[i].committed = True
            key = self._blocks[i].block.key
            if state is BlockState.STORED and key is not None:
                self._stored.append(Located(key, block.slot, block.header_xxh3))
            if state is BlockState.STALE:
                # the store has given the lease up: nothing here is ours
                self.close("the store has given its slots up")
        return tuple(states)

    def _write_header(self, filling: _Filling, ref: SlotRef) -> int:
        key = filling.block.key
        header = self._form.encode(
            PRIVATE_KEY if key is None else key,
            ref.generation,
            filling.block.tokens,
            filling.known or (),
        )
        with self._state:
            if self._closed or filling.target is None:
                raise PutClosed(f"the put has ended: {self._closed}")
            filling.target[: len(header)] = header
        return xxh3_64_intdigest(header)

    async def release(self) -> None:
        """End the put: its pins, unwritten and private slots. Idempotent, no error."""
        await self._release(self)

    def close(self, reason: str) -> None:
        """No write begins any more; for the client. Does not wait for running ones."""
        with self._state:
            self._closed = self._closed or reason
            # the arena may go once nobody looks into it
            for filling in self._blocks:
                filling.target = None
            counted, self._uncounted = self._uncounted, 0
        self._count_bytes(counted)

    def wait_quiet(self, timeout_s: float) -> bool:
        """Block until no write is under way; for the client, in a thread."""
        with self._state:
            return self._state.wait_for(lambda: self._writers == 0, timeout_s)

    @property
    def writing(self) -> bool:
        """Whether a write is under way."""
        return self._writers > 0


def _target(spec: PutSpec, answer: PutSlot) -> memoryview | None:
    if answer.slot is None:
        return None
    start = answer.slot.offset
    return spec.arenas[answer.slot.arena][start : start + answer.slot.length]
