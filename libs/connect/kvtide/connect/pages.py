# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
"""An engine's paged KV memory, seen as whole pages of bytes.

Tensors come from the engine; torch itself is the engine's and never imported here.
"""

from collections.abc import Sequence
from typing import Any

from kvtide.connect.shape import BlockShape
from kvtide.runtime import ConfigError


class Pages:
    """The pages of one cache group: block id → a page of each of its layers.

    A page is what a layer keeps for one block, in whatever order its kernels like; it
    moves whole or not at all.
    """

    def __init__(self, layers: Sequence[Any], uint8: Any) -> None:
        """``layers`` are tensors whose first dimension is blocks; ``uint8`` a dtype.

        Raises:
            ConfigError: a block is not contiguous, or layers differ in their page's size.
        """
        views = [_pages_of(layer, uint8) for layer in layers]
        sizes = {int(view.shape[1]) for view in views}
        if len(sizes) != 1:
            raise ConfigError(
                f"layers of one cache group have pages of {sorted(sizes)} bytes; only "
                "equal ones can be pooled",
                key="kv_cache",
            )
        self.shape = BlockShape(len(views), sizes.pop())
        self.blocks = min(int(view.shape[0]) for view in views)
        self._views = views
        self._host = all(view.device.type == "cpu" for view in views)
        self._bytes = [view.numpy() for view in views] if self._host else []

    def pieces(self, block: int) -> list[memoryview]:
        """The block's pages: the engine's own memory on the host, else a copy of it."""
        if self._host:
            return [pages[block].data for pages in self._bytes]
        return [view[block].cpu().numpy().data for view in self._views]

    def put(self, block: int, pieces: Sequence[memoryview]) -> None:
        """Overwrite the block's pages."""
        for i, piece in enumerate(pieces):
            if self._host:
                self._bytes[i][block].data[:] = piece
            else:
                view = self._views[i]
                staged = view.new_empty(view.shape[1], device="cpu")
                staged.numpy().data[:] = piece
                view[block].copy_(staged)


def _pages_of(layer: Any, uint8: Any) -> Any:
    """``[blocks, bytes]`` over the same memory."""
    sizes, strides = tuple(layer.shape), tuple(layer.stride())
    inner = sorted(zip(strides[1:], sizes[1:], strict=True))
    expected = 1
    for stride, size in inner:
        if size > 1 and stride != expected:
            raise ConfigError(
                f"a block of shape {sizes[1:]} with strides {strides[1:]} is not "
                "contiguous; use a KV cache layout in which a layer's block is",
                key="kv_cache",
            )
        expected *= size
    flat = layer.as_strided((sizes[0], expected), (strides[0], 1))
    return flat.view(uint8)
