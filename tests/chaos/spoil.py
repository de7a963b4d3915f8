"""Spoils and fills the files that pools are in."""

import contextlib
import random
from mmap import mmap
from pathlib import Path

from kvtide.kv.header import MAGIC

KIB = 1 << 10


def flip(file: Path, chance: random.Random, flips: int) -> int:
    """Flip a bit in each of so many blocks of the file, anywhere in them."""
    content = file.read_bytes()
    starts: list[int] = []
    at = content.find(MAGIC)
    while at >= 0:
        starts.append(at)
        at = content.find(MAGIC, at + 1)
    chosen = chance.sample(starts, min(flips, len(starts)))
    with file.open("r+b") as opened, mmap(opened.fileno(), 0) as memory:
        for start in chosen:
            length = int.from_bytes(content[start + 88 : start + 96], "little")
            # a header or, mostly, what it heads
            place = start + chance.choice((chance.randrange(128), length // 2))
            if place < len(memory):
                memory[place] ^= 1 << chance.randrange(8)
    return len(chosen)


def fill(path: Path) -> None:
    """Until there is no room, or no more of it."""
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(64 * KIB)):
            pass
