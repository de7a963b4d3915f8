# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false
# pyright: reportMissingTypeArgument=false
"""The half of vLLM's connector that is in a rank's worker: it moves pages."""

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
)

from kvtide.connect.page_mover import Finished, PageMover
from kvtide.connect.pages import Pages
from kvtide.connect.prefix_plan import Task
from kvtide.connect.vllm_shared import KvtideMetadata, Shared
from kvtide.runtime import ConfigError

IDLE_PAUSE_S = 0.002
"""So long a step that computes nothing waits for a load. What vLLM is asked meanwhile
waits as long."""


class Rank:
    """A rank's half."""

    def __init__(self, config: Any, cache_config: Any) -> None:
        rank = _tensor_parallel_rank()
        self.shared = Shared(config, cache_config, range(rank, rank + 1))
        self._groups = cache_config.kv_cache_groups
        self._mover: PageMover | None = None
        self._done = Finished()

    def register(self, kv_caches: dict[str, Any]) -> None:
        """These are the engine's pages."""
        pages = [
            Pages([kv_caches[name] for name in group.layer_names], torch.uint8)
            for group in self._groups
        ]
        found = tuple(each.shape for each in pages)
        if found != self.shared.shapes:
            raise ConfigError(
                f"pages are {found} in memory and {self.shared.shapes} in vLLM's "
                "configuration; this vLLM is not supported",
                key="kv_cache",
            )
        self._mover = PageMover(self.shared.client, pages, self.shared.books[0])

    def load(self, tasks: tuple[Task, ...]) -> None:
        """Begin to load."""
        if self._mover is not None:
            for task in tasks:
                self._mover.load(task)

    def save(self, tasks: tuple[Task, ...]) -> None:
        """Save, in bounded time."""
        if self._mover is not None and tasks:
            self._mover.save(tasks)

    def pause(self, metadata: KvtideMetadata) -> None:
        """Where a step does nothing and vLLM would go on to the next: let us work."""
        mover = self._mover
        if mover is not None and metadata.idle and (mover.loading or metadata.awaits):
            mover.pause(IDLE_PAUSE_S)

    def results(self) -> KVConnectorTransferResults:
        """Loads that are over; their bad blocks are kept for ``bad_blocks``."""
        self._done = Finished() if self._mover is None else self._mover.finished()
        # block ids name blocks of one group only
        apart = len(self._groups) > 1
        return KVConnectorTransferResults(
            finished_recving=set(self._done.requests),
            failed_recving=set(self._done.failed) if apart else set(),
        )

    def bad_blocks(self) -> set[int]:
        """Blocks that the requests in the last ``results`` lack."""
        return self._done.bad_blocks if len(self._groups) == 1 else set()

    def close(self) -> None:
        """End."""
        if self._mover is not None:
            self._mover.close()


def _tensor_parallel_rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank  # noqa: PLC0415

    return int(get_tensor_model_parallel_rank())
