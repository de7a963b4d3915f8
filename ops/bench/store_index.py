r"""A store's index at a million blocks: memory, eviction and presence queries.

    .venv/bin/python ops/bench/store_index.py --blocks 1000000

Memory is the growth of the resident set while blocks are put into an arena that has no
memory of its own, divided by their number. Eviction is timed while one block after the
other is put into a full arena, at a tenth of the blocks and at all of them: what takes
constant time has a ratio near 1 (more keys miss the processor's caches). Presence is one
query of 64 keys after the other. Times are of the processor, so that others on the machine matter less. Prints a
line, or JSON with ``--json``.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from blake3 import blake3

from kvtide.kv import BlockKey, NodeId, NodeRef, SpaceTags
from kvtide.store.eviction import Policy
from kvtide.store.inventory import Inventory
from kvtide.store.slot_states import TableRules
from kvtide.store.slots import SlotTable
from kvtide.store.spaces import Space
from kvtide.store.tally import Tally

SLOT_BYTES = 1 << 20
TENANTS = 8
QUERY_KEYS = 64
TIMED = 20_000


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured of one policy."""

    policy: str
    blocks: int
    bytes_a_block: float
    put_us_small: float
    put_us: float
    put_ratio: float
    presence_keys_per_s: float


def resident_bytes() -> int:
    """What this process has in memory now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def keys_from(first: int) -> Iterator[BlockKey]:
    """Keys as real ones are: uniform."""
    while True:
        yield BlockKey(blake3(first.to_bytes(8, "big")).digest(length=16))
        first += 1


class Filled:
    """A store of ``blocks`` slots, all of them taken."""

    def __init__(self, policy: Policy, blocks: int) -> None:
        """Fill it."""
        before = resident_bytes()
        table = SlotTable(blocks * SLOT_BYTES, TableRules(policy=policy))
        self.inventory = Inventory(NodeRef(NodeId("store"), 1), table, Tally())
        self._spaces = [
            Space(SpaceTags(0, bytes(16), bytes(16), bytes([i]) * 16), SLOT_BYTES, 4096)
            for i in range(TENANTS)
        ]
        self._keys = keys_from(0)
        for number in range(blocks):
            self.put(number)
        self.bytes_a_block = (resident_bytes() - before) / blocks

    def put(self, number: int) -> None:
        """Put one block, which may evict another."""
        space = self._spaces[number % TENANTS]
        slot = self.inventory.reserve(space, next(self._keys), 64, 0.0)
        assert slot is not None
        self.inventory.admit(slot, number, 0.0)
        if number % 1000 == 0:
            self.inventory.tell()

    def put_us(self) -> float:
        """Microseconds to put a block where another must go."""
        started = time.process_time()
        for number in range(TIMED):
            self.put(number)
        return (time.process_time() - started) / TIMED * 1e6

    def presence_keys_per_s(self) -> float:
        """Keys a second, asked for in queries of ``QUERY_KEYS``."""
        keys = [key for key in self.inventory.table.key if key is not None][: 1 << 16]
        queries = [
            keys[i : i + QUERY_KEYS]
            for i in range(0, len(keys) - QUERY_KEYS, QUERY_KEYS)
        ]
        started = time.process_time()
        found = sum(len(self.inventory.present(query)) for query in queries)
        return found / (time.process_time() - started)


def measure(policy: Policy, blocks: int) -> Figures:
    """All figures of one policy."""
    # first, so that it finds no memory that something else gave back
    filled = Filled(policy, blocks)
    put_us = filled.put_us()
    small = Filled(policy, blocks // 10).put_us()
    return Figures(
        policy=policy,
        blocks=blocks,
        bytes_a_block=round(filled.bytes_a_block, 1),
        put_us_small=round(small, 2),
        put_us=round(put_us, 2),
        put_ratio=round(put_us / small, 2),
        presence_keys_per_s=round(filled.presence_keys_per_s()),
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--policy", choices=list(Policy), default=Policy.LRU)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(Policy(options.policy), options.blocks)
    if options.json:
        print(json.dumps(asdict(figures)))
        return 0
    print(
        f"{figures.policy}: {figures.blocks} blocks, {figures.bytes_a_block} bytes "
        f"each; a put that evicts {figures.put_us} us, {figures.put_ratio} of that "
        f"at a tenth of the blocks; {figures.presence_keys_per_s} keys/s asked for"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
