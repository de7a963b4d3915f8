"""Attention of a whole mixed batch in one kernel that follows tables of pages.

FlashInfer's paged prefill kernel does chunks and single tokens alike: with `causal`
the last query of each sequence stands at its last key.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from kvtide.engine.architecture import Architecture
from kvtide.engine.paged_memory import PagedRun, PagePool

VARIANT: Final = "flashinfer-paged"
"""Goes into the numerics of a model."""

WORKSPACE_BYTES: Final = 128 << 20

_HEAD_DIMS = frozenset({64, 128, 256})
_DTYPES = frozenset({torch.float16, torch.bfloat16})


class PagedKernel(Protocol):
    """What is used of FlashInfer's `BatchPrefillWithPagedKVCacheWrapper`."""

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        /,
        *,
        causal: bool,
        q_data_type: torch.dtype,
    ) -> None:
        """Say what the next runs attend to."""
        ...

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        """Attend: [tokens, heads, head_dim]."""
        ...


class PagedSpan(Protocol):
    """Rows first..last of a batch are tokens start..end of a run."""

    @property
    def run(self) -> Any:
        """A `PagedRun`."""
        ...

    @property
    def first(self) -> int:
        """Its first row."""
        ...

    @property
    def last(self) -> int:
        """Behind its last row."""
        ...

    @property
    def end(self) -> int:
        """Tokens that its last row sees."""
        ...


def served(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlashInfer is installed and can do this."""
    fits = device.type == "cuda" and dtype in _DTYPES and head_dim in _HEAD_DIMS
    return fits and importlib.util.find_spec("flashinfer") is not None


def flashinfer_kernel(device: torch.device) -> PagedKernel:
    """The kernel on this device; takes a workspace there."""
    flashinfer: Any = importlib.import_module("flashinfer")
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")


class PagedAttention:
    """Attention over the pages of a pool. One batch at a time."""

    def __init__(
        self,
        kernel: PagedKernel,
        pool: PagePool,
        architecture: Architecture,
        dtype: torch.dtype,
    ) -> None:
        """None of these is owned."""
        self._kernel = kernel
        self._pool = pool
        self._shape = architecture
        self._dtype = dtype

    def plan(self, spans: Sequence[PagedSpan]) -> None:
        """The batches that follow have these rows, one span behind the other.

        Raises:
            RunClosed: one of the runs was closed.
        """
        size = self._pool.page_tokens
        rows, starts, pages, fills = [0], [0], list[int](), list[int]()
        for span in spans:
            run: PagedRun = span.run
            table = run.table(span.end)
            rows.append(rows[-1] + span.last - span.first)
            starts.append(starts[-1] + len(table))
            pages.extend(table)
            fills.append(span.end - (len(table) - 1) * size)
        self._kernel.plan(
            self._int32(rows),
            self._int32(starts),
            self._int32(pages),
            self._int32(fills),
            self._shape.heads,
            self._shape.kv_heads,
            self._shape.head_dim,
            size,
            causal=True,
            q_data_type=self._dtype,
        )

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Queries [tokens, heads, head_dim] of the plan's rows; [tokens, heads * head_dim]."""
        attended = self._kernel.run(query.contiguous(), self._pool.layers[layer])
        return attended.reshape(len(query), -1)

    def _int32(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self._pool.device)
