"""The KV memory of one sequence."""

import mmap
import sys
from typing import Final

import torch

from kvtide.engine.errors import RunClosed
from kvtide.engine.facts import ModelFacts
from kvtide.kv import Layout, PartKind

KEY: Final = PartKind.K
VALUE: Final = PartKind.V

# mmap names it only in newer Pythons; the number is Linux's
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


class KvRun:
    """K and V of one sequence: one contiguous run of tokens per layer and kind.

    The bytes of a part are `[token][kv_head][head_dim]`. Address space is reserved for
    the capacity at once; the operating system commits a page when it is first written,
    so capacity costs nothing until it is used.

    The run owns its memory. Views given out by `part` keep it alive: it goes back when
    the run is closed and the last view is gone, so a late reader or writer never
    touches memory of someone else.

    Not thread-safe by itself: a step writes only the tokens that it computes, so other
    threads may at the same time read or write others.

    Attributes:
        capacity: tokens that it has room for.
    """

    def __init__(self, facts: ModelFacts, capacity_tokens: int) -> None:
        if capacity_tokens < 1:
            message = f"a run needs room for a token, not {capacity_tokens}"
            raise ValueError(message)
        self.capacity = capacity_tokens
        self._length = 0
        self._layers = facts.layers
        layout = Layout.of(facts)
        self._token_bytes = layout.token_bytes
        memory = _reserve(capacity_tokens * layout.token_bytes * layout.parts)
        self._memory: memoryview | None = memoryview(memory)
        parts = torch.frombuffer(memory, dtype=getattr(torch, facts.kv_dtype)).view(
            facts.layers, 2, capacity_tokens, facts.kv_heads, facts.head_dim
        )
        self._keys = list(parts[:, KEY].unbind())
        self._values = list(parts[:, VALUE].unbind())

    @property
    def length(self) -> int:
        """Valid tokens from the start. Set it after a prefix was read into the parts."""
        return self._length

    @length.setter
    def length(self, tokens: int) -> None:
        self._set_length(tokens)

    def _set_length(self, tokens: int) -> None:
        if not 0 <= tokens <= self.capacity:
            message = f"length {tokens} is not within 0..{self.capacity}"
            raise ValueError(message)
        self._length = tokens

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._memory is None

    def part(self, layer: int, kind: int, start: int, end: int) -> memoryview:
        """The bytes of tokens start..end of one layer's K or V: writable, contiguous.

        Raises:
            RunClosed: the run was closed.
            IndexError: the layer, the kind or the range does not exist.
        """
        if self._memory is None:
            raise RunClosed("the run is closed")
        if not (
            0 <= layer < self._layers
            and kind in {KEY, VALUE}
            and 0 <= start <= end <= self.capacity
        ):
            message = f"no part: layer {layer}, kind {kind}, tokens {start}..{end}"
            raise IndexError(message)
        base = (2 * layer + kind) * self.capacity
        return self._memory[
            (base + start) * self._token_bytes : (base + end) * self._token_bytes
        ]

    def keys(self, layer: int) -> torch.Tensor:
        """One layer's K, [capacity, kv_heads, head_dim], a view.

        Raises:
            RunClosed: the run was closed.
        """
        return self._view(self._keys, layer)

    def values(self, layer: int) -> torch.Tensor:
        """One layer's V, [capacity, kv_heads, head_dim], a view.

        Raises:
            RunClosed: the run was closed.
        """
        return self._view(self._values, layer)

    def _view(self, views: list[torch.Tensor], layer: int) -> torch.Tensor:
        if self._memory is None:
            raise RunClosed("the run is closed")
        return views[layer]

    def write(
        self,
        layer: int,
        start: int,
        end: int,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """A step has computed K and V of these tokens, [tokens, kv_heads, head_dim].

        Raises:
            RunClosed: the run was closed.
        """
        self._view(self._keys, layer)[start:end] = key
        self._view(self._values, layer)[start:end] = value

    def complete(self, layer: int, start: int, end: int) -> None:
        """A step will attend to all tokens before `end`.

        It wrote those from `start` on; those before may have come from elsewhere.
        """

    def close(self) -> None:
        """Give the memory up; calling it again does nothing."""
        self._memory = None
        self._keys = []
        self._values = []
        self._length = 0


def _reserve(size_bytes: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, size_bytes, flags=flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # a huge page per layer and kind would commit 2 MiB for a handful of tokens
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
