"""The forward pass of a Llama-like decoder over runs of KV memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from kvtide.engine.accelerator import CPU
from kvtide.engine.architecture import Architecture
from kvtide.engine.attention import attend, history_mask
from kvtide.engine.memory import KvRun
from kvtide.engine.paged_attention import PagedAttention
from kvtide.engine.rope import Rotation, inverse_frequencies
from kvtide.engine.threads import compute_threads, one_thread
from kvtide.engine.weights import DecoderWeights, LayerWeights

# scores x heads x head_dim up to which one thread attends faster than all: seen for
# two cores between 512 and 1,024 tokens of 9 x 64
_SERIAL_WORK = 400_000

# rows x columns x columns of a layer's widest product up to which one thread is faster
# than all: seen for two cores between 8 and 16 rows of 576 x 3,072
_SERIAL_PRODUCT = 15_000_000


@dataclass(frozen=True, slots=True)
class Span:
    """Rows first..last of the batch are tokens start..end of a run."""

    run: KvRun
    first: int
    last: int
    start: int
    end: int
    mask: Tensor | None

    def tail(self, row: int) -> "Span":
        """The span's last token alone, as the given row."""
        return Span(self.run, row, row + 1, self.end - 1, self.end, None)

    @property
    def score_count(self) -> int:
        """Scores of one head: what its attention costs."""
        return (self.end - self.start) * self.end


class Decoder:
    """Embedding, layers, final norm and head; holds no state of any sequence."""

    def __init__(
        self,
        architecture: Architecture,
        weights: DecoderWeights,
        dtype: torch.dtype,
        device: torch.device = CPU,
        paged: PagedAttention | None = None,
    ) -> None:
        """With `paged`, all runs are `PagedRun`s of its pool."""
        self._shape = architecture
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._paged = paged
        frequencies = inverse_frequencies(architecture.rope, architecture.head_dim)
        self._inv_freq = frequencies.to(device)

    def span(self, run: KvRun, first: int, start: int, tokens: int) -> Span:
        """Place the tokens start..start+tokens of a run at a row of the batch."""
        end = start + tokens
        mask = history_mask(start, end, self._dtype) if self._paged is None else None
        mask = mask if mask is None else mask.to(self._device)
        return Span(run, first, first + tokens, start, end, mask)

    def forward(
        self,
        token_ids: Sequence[int],
        spans: Sequence[Span],
        wanted: Sequence[int],
        between: Callable[[int], None],
        written: Callable[[int], None],
    ) -> Tensor | None:
        """Compute all spans; return logits, float32 [len(wanted), vocab].

        Each layer writes its K and V into the runs. `wanted` are indices of spans whose
        last token's logits are wanted; None is returned where there are none.
        `between(layer)` is called before a layer is computed and `written(layer)` when
        its K and V are in all runs, before its attention reads them; either may raise.
        """
        device = self._device
        ids = torch.tensor(token_ids, device=device)
        hidden = self._weights.embedding[ids].to(self._dtype)
        ranges = [torch.arange(s.start, s.end) for s in spans]
        positions = torch.cat(ranges).to(device)
        rotation = Rotation(self._inv_freq, positions, self._dtype)
        final = len(self._weights.layers) - 1
        threads = torch.get_num_threads()
        if self._paged is not None:
            self._paged.plan(spans)
        for index, layer in enumerate(self._weights.layers):
            between(index)
            with compute_threads(self._threads_for(len(hidden), threads)):
                query = self._project(index, layer, hidden, rotation, spans)
            written(index)
            for span in spans:
                span.run.complete(index, span.start, span.end)
            if index == final:
                # what follows the last layer's K and V serves the wanted logits only
                if not wanted:
                    return None
                rows = torch.tensor([spans[i].last - 1 for i in wanted], device=device)
                query, hidden = query[rows], hidden[rows]
                tails: list[Span] = [spans[i].tail(row) for row, i in enumerate(wanted)]
                spans = tails
                if self._paged is not None:
                    self._paged.plan(tails)
            attended = self._attend(index, query, spans)
            with compute_threads(self._threads_for(len(hidden), threads)):
                self._mix(layer, hidden, attended)
        return self._weights.head(self._norm(hidden, self._weights.norm)).float()

    def _threads_for(self, rows: int, threads: int) -> int:
        """How many threads of these multiply a layer's weights with so many rows."""
        widest = self._shape.hidden_size * 2 * self._shape.intermediate_size
        return 1 if rows * widest <= _SERIAL_PRODUCT else threads

    def _project(
        self,
        index: int,
        layer: LayerWeights,
        hidden: Tensor,
        rotation: Rotation,
        spans: Sequence[Span],
    ) -> Tensor:
        """Write K and V of one layer; return its queries [tokens, heads, head_dim]."""
        a = self._shape
        qkv = layer.qkv(self._norm(hidden, layer.input_norm))
        qkv = qkv.view(len(hidden), a.heads + 2 * a.kv_heads, a.head_dim)
        qk, value = qkv[:, : a.heads + a.kv_heads], qkv[:, a.heads + a.kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self._norm(qk[:, : a.heads], layer.query_norm)
            key = self._norm(qk[:, a.heads :], layer.key_norm)
            qk = torch.cat((query, key), 1)
        qk = rotation.apply(qk)
        key = qk[:, a.heads :]
        for span in spans:
            here = slice(span.first, span.last)
            span.run.write(index, span.start, span.end, key[here], value[here])
        return qk[:, : a.heads]

    def _attend(self, index: int, query: Tensor, spans: Sequence[Span]) -> Tensor:
        """What each query gathers of its own run, [tokens, heads * head_dim]."""
        if self._paged is not None:
            return self._paged.attend(index, query)
        a = self._shape
        attended = query.new_empty(len(query), a.heads * a.head_dim)

        def attend_each(some: Sequence[Span]) -> None:
            for span in some:
                here = slice(span.first, span.last)
                keys = span.run.keys(index)[: span.end]
                values = span.run.values(index)[: span.end]
                attend(query[here], keys, values, span.mask, attended[here])

        limit = _SERIAL_WORK // (a.heads * a.head_dim)
        with one_thread():
            attend_each([span for span in spans if span.score_count <= limit])
        attend_each([span for span in spans if span.score_count > limit])
        return attended

    def _mix(self, layer: LayerWeights, hidden: Tensor, attended: Tensor) -> None:
        """Add what was gathered, then the gated MLP's output, to `hidden`."""
        hidden += layer.output(attended)
        gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, -1)
        hidden += layer.down(silu(gate).mul_(up))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self._shape.rms_norm_eps)
