"""How many blocks of a trace the pool's own eviction code would have had.

One pool, one request at a time: a request looks up its blocks front to back; a hit is a
block that was there. Then it touches those that are there and inserts the others, in
the same order or tail first.
"""

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvtide.runtime import KvtideError
from kvtide.store.eviction import NONE, Policy

BLOCK_TOKENS = 512
MAX_LINE_BYTES = 4 << 20


class TraceError(KvtideError):
    """A trace can't be read: which file and line, and what a line must be."""


class TraceRequest(msgspec.Struct, frozen=True):
    """A line of a trace: arrival, lengths in tokens, and an id for each block.

    Equal ids mean equal tokens up to and including that block. A gateway's log is a
    trace that says its ``block_tokens`` (see ``kvtide.kv.LoggedRequest``).
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    block_tokens: int = BLOCK_TOKENS


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of a JSON-lines file, which may be compressed (``.gz``).

    Raises:
        TraceError: it can't be read.
    """
    decoder = msgspec.json.Decoder(TraceRequest)
    found: list[TraceRequest] = []
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rb") as lines:
            while line := lines.readline(MAX_LINE_BYTES):
                number += 1
                found.append(decoder.decode(line))
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path} can't be read: {error}") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TraceError(
            f"{path}, line {number}: {error}; each line is an object with timestamp, "
            "input_length, output_length and hash_ids"
        ) from error
    return found


@dataclass(frozen=True, slots=True)
class HitCounts:
    """``hits`` of ``blocks`` were there; ``prefix_hits`` before a request's first miss.

    Serving can use the latter: attention needs the whole prefix.
    """

    blocks: int
    hits: int
    prefix_hits: int

    @property
    def hit_rate(self) -> float:
        """Of all blocks looked up."""
        return self.hits / self.blocks if self.blocks else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Of all blocks looked up, those that serving could use."""
        return self.prefix_hits / self.blocks if self.blocks else 0.0


def replay(
    requests: Sequence[TraceRequest],
    capacity_blocks: int,
    policy: Policy,
    *,
    tail_first: bool = False,
) -> HitCounts:
    """Play a trace against a pool of ``capacity_blocks`` that starts empty."""
    pool = _Pool(max(1, capacity_blocks), policy)
    blocks = hits = prefix_hits = 0
    for request in requests:
        ids = request.hash_ids
        present = pool.present(ids)
        blocks += len(ids)
        hits += sum(present)
        prefix_hits += present.index(False) if False in present else len(ids)
        pool.take(ids, tail_first=tail_first)
    return HitCounts(blocks, hits, prefix_hits)


class _Pool:
    """Blocks in slots, and the store's eviction policy over them."""

    def __init__(self, capacity_blocks: int, policy: Policy) -> None:
        self._eviction = policy.make()
        self._eviction.add_slots(capacity_blocks)
        self._line = self._eviction.add_line()
        self._slots: dict[int, int] = {}
        self._block = [NONE] * capacity_blocks

    def present(self, ids: Sequence[int]) -> list[bool]:
        """Which of the blocks are here."""
        return [block in self._slots for block in ids]

    def take(self, ids: Sequence[int], *, tail_first: bool) -> None:
        """Use what is here, and put in what is not."""
        eviction, slots = self._eviction, self._slots
        places = range(len(ids))
        for depth in reversed(places) if tail_first else places:
            block = ids[depth]
            slot = slots.get(block)
            if slot is not None:
                eviction.use(slot)
                continue
            slot = len(slots)
            if slot == len(self._block):
                slot = eviction.next(self._line)
                eviction.evict(slot, self._block[slot])
                del slots[self._block[slot]]
            slots[block], self._block[slot] = slot, block
            eviction.begin(slot, block, depth)
            eviction.enter(self._line, slot)
