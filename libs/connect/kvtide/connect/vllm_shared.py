# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false
# pyright: reportMissingTypeArgument=false
"""What both halves of vLLM's connector have, and what one tells the other."""

from dataclasses import asdict, dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.version import __version__ as vllm_version

from kvtide.connect.client import EngineClient
from kvtide.connect.counts import ClientCounts
from kvtide.connect.logs import log_beside_the_engine
from kvtide.connect.owner import end_with
from kvtide.connect.prefix_plan import Task
from kvtide.connect.settings import connect_settings
from kvtide.connect.space_book import SpaceBook
from kvtide.connect.vllm_facts import check_config, engine_spaces, geometry, shapes
from kvtide.connect.vllm_metrics import KvtideStats


@dataclass
class KvtideMetadata(KVConnectorMetadata):
    """Scheduler → workers: what to move in this step.

    Attributes:
        loads: to begin.
        saves: to do.
        idle: the step computes nothing.
        awaits: a request waits for blocks that the pool does not show yet.
    """

    loads: tuple[Task, ...] = ()
    saves: tuple[Task, ...] = ()
    idle: bool = False
    awaits: bool = False


class Shared:
    """What both roles have: the client, and the spaces of one or more ranks."""

    def __init__(self, config: Any, cache_config: Any, ranks: range) -> None:
        check_config(config)
        extra = config.kv_transfer_config.kv_connector_extra_config
        self.settings = connect_settings(dict(extra))
        log_beside_the_engine(self.settings.log_level)
        if self.settings.owner_pid:
            end_with(self.settings.owner_pid)
        unit, hashed = resolve_kv_cache_block_sizes(cache_config, config)
        self.geometry = geometry(cache_config, unit, hashed)
        self.shapes = shapes(cache_config)
        spaces = [
            engine_spaces(
                config,
                cache_config,
                self.settings,
                vllm_version,
                rank,
                self.geometry.leader,
            )
            for rank in ranks
        ]
        self.client = EngineClient(self.settings)
        self.books = [SpaceBook(self.client, each, self.shapes) for each in spaces]
        self._told = ClientCounts()
        transfer = config.kv_transfer_config
        self.loads = transfer.is_kv_consumer and self.settings.mode != "save"
        self.saves = transfer.is_kv_producer and self.settings.mode != "load"

    def stats(self) -> KvtideStats | None:
        """What was done since the last call; None: nothing."""
        now = self.client.counts()
        done, self._told = now.minus(self._told), now
        stats = KvtideStats(data=asdict(done))
        return None if stats.is_empty() else stats
