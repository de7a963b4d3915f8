"""The KV memory of a sequence on an accelerator, with its bytes on the host too."""

from abc import ABC, abstractmethod

import torch
from typing_extensions import override

from kvtide.engine.facts import ModelFacts
from kvtide.engine.memory import KvRun


class MirroredRun(KvRun, ABC):
    """K and V on a device for attention, and on the host for whoever moves bytes.

    `part` gives the host's bytes: what a step computes is copied there layer by layer,
    before anybody is told; what others wrote there is copied to the device before it is
    attended to. So transfers, checksums and hand-over are the same as on the CPU.
    """

    def __init__(self, facts: ModelFacts, capacity_tokens: int) -> None:
        """Take the host's room; the device's is the concrete class's."""
        super().__init__(facts, capacity_tokens)
        self._same = [0] * facts.layers

    @abstractmethod
    def _put(
        self,
        layer: int,
        start: int,
        end: int,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Copy K and V of these tokens, wherever they are, into the device's memory."""

    @property
    @override
    def length(self) -> int:
        """Valid tokens from the start."""
        return self._length

    @length.setter
    def length(self, tokens: int) -> None:
        self._set_length(tokens)
        # what follows may be written anew by others
        self._same = [min(same, tokens) for same in self._same]

    @override
    def write(
        self,
        layer: int,
        start: int,
        end: int,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        super().write(layer, start, end, key, value)
        self._put(layer, start, end, key, value)

    @override
    def complete(self, layer: int, start: int, end: int) -> None:
        same = min(self._same[layer], start)
        if same < start:
            key = super().keys(layer)[same:start]
            self._put(layer, same, start, key, super().values(layer)[same:start])
        self._same[layer] = end


class DeviceRun(MirroredRun):
    """A contiguous run on the device."""

    def __init__(
        self, facts: ModelFacts, capacity_tokens: int, device: torch.device
    ) -> None:
        """Take room for the capacity on the device, at once."""
        super().__init__(facts, capacity_tokens)
        shape = (2, capacity_tokens, facts.kv_heads, facts.head_dim)
        dtype = getattr(torch, facts.kv_dtype)
        self._on_device = [
            torch.empty(shape, dtype=dtype, device=device) for _ in range(facts.layers)
        ]

    @override
    def keys(self, layer: int) -> torch.Tensor:
        super().keys(layer)  # refuses a closed run
        return self._on_device[layer][0]

    @override
    def values(self, layer: int) -> torch.Tensor:
        super().values(layer)
        return self._on_device[layer][1]

    @override
    def _put(
        self,
        layer: int,
        start: int,
        end: int,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        self.keys(layer)[start:end] = key
        self.values(layer)[start:end] = value

    @override
    def close(self) -> None:
        super().close()
        self._on_device = []
