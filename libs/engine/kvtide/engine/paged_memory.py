"""KV memory on an accelerator in pages that tables assign, for kernels that follow them."""

import torch
from torch import Tensor
from typing_extensions import override

from kvtide.engine.device_memory import MirroredRun
from kvtide.engine.errors import NoPages, RunClosed
from kvtide.engine.facts import ModelFacts
from kvtide.engine.memory import KEY, VALUE


class PagePool:
    """K and V of all sequences: for each layer [pages, K and V, tokens, kv_heads, head_dim].

    A run takes its pages when it is made and gives them back when it is closed. For one
    thread at a time: runs are made and closed by the loop that asks for steps.
    """

    def __init__(
        self, facts: ModelFacts, pages: int, page_tokens: int, device: torch.device
    ) -> None:
        """Take the memory, at once."""
        self.page_tokens = page_tokens
        self.pages = pages
        self.device = device
        shape = (pages, 2, page_tokens, facts.kv_heads, facts.head_dim)
        dtype = getattr(torch, facts.kv_dtype)
        self.layers = [
            torch.zeros(shape, dtype=dtype, device=device) for _ in range(facts.layers)
        ]
        self._free = list(range(pages))

    @property
    def free(self) -> int:
        """Pages that nobody has."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many pages, which may lie anywhere.

        Raises:
            NoPages: there are not so many; none is taken.
        """
        if count > len(self._free):
            raise NoPages(count, len(self._free))
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def give(self, pages: list[int]) -> None:
        """They are nobody's again."""
        self._free.extend(pages)


class PagedRun(MirroredRun):
    """One sequence's table of pages on the device."""

    def __init__(self, facts: ModelFacts, capacity_tokens: int, pool: PagePool) -> None:
        """Take pages for the whole capacity.

        Raises:
            NoPages: the pool has not enough.
        """
        super().__init__(facts, capacity_tokens)
        self._pool = pool
        self._table = pool.take(-(-capacity_tokens // pool.page_tokens))
        self._pages = torch.tensor(self._table, device=pool.device)

    def table(self, end: int) -> list[int]:
        """The pages of the tokens before `end`, in their order.

        Raises:
            RunClosed: the run was closed.
        """
        if self.closed:
            raise RunClosed("the run is closed")
        return self._table[: -(-end // self._pool.page_tokens)]

    @override
    def close(self) -> None:
        super().close()
        self._pool.give(self._table)
        self._table = []

    @override
    def _put(
        self, layer: int, start: int, end: int, key: Tensor, value: Tensor
    ) -> None:
        at = torch.arange(start, end, device=self._pool.device)
        page, place = (
            self._pages[at // self._pool.page_tokens],
            at % self._pool.page_tokens,
        )
        memory = self._pool.layers[layer]
        memory[page, KEY, place] = key.to(memory.device)
        memory[page, VALUE, place] = value.to(memory.device)
