"""A node's index at many blocks, in a process of its own: memory, eviction, presence.

``python -m kvtide.cli.store_bench.index_growth BLOCKS`` prints a line of JSON. The arena
is only an address range here: what grows is what the store keeps of its blocks.
"""

import gc
import json
import secrets
import sys
from collections.abc import Iterator, Sequence
from itertools import count

import psutil

from kvtide.bus.codec import Codec
from kvtide.bus.messages import Presence
from kvtide.cli.store_bench.rig import LAYOUT, SPACE
from kvtide.kv import BlockKey, NodeId, NodeRef
from kvtide.runtime import SystemClock
from kvtide.store.events import Received, Reply
from kvtide.store.machine import StoreMachine
from kvtide.store.spaces import Space
from kvtide.store.store_rules import StoreRules

TELL_EVERY = 1000
EVICTIONS = 20_000
QUERIES = 100_000
CHAIN = 64
ASKER = NodeRef(NodeId("asker"), 1)


def measure(blocks: int) -> dict[str, float]:
    """Bytes a block, seconds an eviction, and presence queries a second."""
    space = Space(SPACE.tags, LAYOUT.slot_bytes, LAYOUT.header_bytes)
    stride = -(-LAYOUT.slot_bytes // 64) * 64
    slab_bytes = 64 * stride
    rules = StoreRules(arena_bytes=-(-blocks // 64) * slab_bytes, slab_bytes=slab_bytes)
    keys = _keys()
    gc.collect()
    before = psutil.Process().memory_info().rss
    machine = StoreMachine(NodeRef(NodeId("store"), 1), rules)
    found: dict[str, float] = {"blocks": blocks}
    for number in range(blocks):
        _store(machine, space, next(keys), float(number))
        if number % TELL_EVERY == 0:
            machine.inventory.tell()
    machine.inventory.tell()
    gc.collect()
    grown = psutil.Process().memory_info().rss - before
    found["bytes_per_block"] = grown / blocks
    found["eviction_us"] = 1e6 * _evict(machine, space, keys, float(blocks))
    found |= _presence(machine)
    return found


def _keys() -> Iterator[BlockKey]:
    """As a message would bring them: objects of their own."""
    seed = secrets.token_bytes(8)
    return (BlockKey(SPACE.key(BlockKey(seed.ljust(16)), [n])) for n in count())


def _store(machine: StoreMachine, space: Space, key: BlockKey, now_s: float) -> None:
    slot = machine.inventory.reserve(space, key, LAYOUT.block_tokens, now_s)
    if slot is None:
        raise RuntimeError("the index is full")
    machine.inventory.admit(slot, 1, now_s)


def _evict(
    machine: StoreMachine, space: Space, keys: Iterator[BlockKey], now_s: float
) -> float:
    """Seconds for one block to go and another to come."""
    fresh = [next(keys) for _ in range(min(EVICTIONS, machine.load().used_slots))]
    clock = SystemClock()
    started_s = clock.monotonic()
    for number, key in enumerate(fresh):
        _store(machine, space, key, now_s)
        if number % TELL_EVERY == 0:
            machine.inventory.tell()
    return (clock.monotonic() - started_s) / len(fresh)


def _presence(machine: StoreMachine) -> dict[str, float]:
    """Queries of one key each (bare, and with their coding), and keys a second in queries for a chain."""
    held = machine.inventory.index.page(None, QUERIES)
    clock = SystemClock()
    singles = [Presence(keys=(key,)) for key in held]
    started_s = clock.monotonic()
    for number, message in enumerate(singles):
        machine.handle(Received(message, ASKER, number), 1e9)
    single_s = clock.monotonic() - started_s
    chains = [
        Presence(keys=tuple(held[at : at + CHAIN])) for at in range(0, len(held), CHAIN)
    ]
    started_s = clock.monotonic()
    for number, message in enumerate(chains):
        machine.handle(Received(message, ASKER, number), 1e9)
    chain_s = clock.monotonic() - started_s
    wired_s = _wired(machine, singles)
    return {
        "presence_wired_per_s": len(singles) / wired_s,
        "presence_queries_per_s": len(singles) / single_s,
        "presence_keys_per_s": len(held) / chain_s,
    }


def _wired(machine: StoreMachine, asked: Sequence[Presence]) -> float:
    """Seconds from frames that came to frames that go, for that many queries."""
    codec, clock = Codec(), SystemClock()
    frames = [codec.wrap(ASKER, "", codec.encode_body(message)) for message in asked]
    started_s = clock.monotonic()
    for number, frame in enumerate(frames):
        opened = codec.open(frame)
        if not isinstance(opened.body, Presence):
            raise TypeError("a query came as something else")
        for command in machine.handle(
            Received(opened.body, opened.sender, number), 1e9
        ):
            if isinstance(command, Reply):
                codec.wrap(ASKER, "", codec.encode_body(command.message))
    return clock.monotonic() - started_s


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(int(sys.argv[1]))) + "\n")
