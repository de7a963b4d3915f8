# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false
# pyright: reportMissingTypeArgument=false
"""vLLM's connector: a prefix store that all instances share.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvtideConnector",
      "kv_connector_module_path": "kvtide.connect.vllm", "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute"}'

Written against vLLM 0.32's ``KVConnectorBase_V1``. Loads are asynchronous: vLLM parks a
request until its blocks are there, so no token is computed from a block that was not
verified. This module alone imports vLLM.
"""

from dataclasses import asdict, dataclass
from typing import Any

import structlog
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.version import __version__ as vllm_version

from kvtide.connect.client import EngineClient
from kvtide.connect.counts import FIELDS, ClientCounts
from kvtide.connect.logs import log_beside_the_engine
from kvtide.connect.page_mover import Finished, PageMover
from kvtide.connect.pages import Pages
from kvtide.connect.prefix_plan import Claim, PrefixPlan, Task
from kvtide.connect.settings import connect_settings
from kvtide.connect.space_book import SpaceBook
from kvtide.connect.vllm_facts import (
    Claims,
    check_config,
    engine_spaces,
    geometry,
    shapes,
)
from kvtide.runtime import ConfigError

log = structlog.get_logger("kvtide.connect")


@dataclass
class KvtideMetadata(KVConnectorMetadata):
    """Scheduler → workers: what to move in this step."""

    loads: tuple[Task, ...] = ()
    saves: tuple[Task, ...] = ()


class KvtideStats(KVConnectorStats):
    """Differences of ``ClientCounts``, summed over ranks and steps."""

    def reset(self) -> None:
        """Nothing was done."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether nothing was done."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Both together, in this one."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        return {name: round(value, 6) for name, value in self.data.items() if value}


class KvtidePromMetrics(KVConnectorPromMetrics):
    """``vllm:kvtide_…_total`` for each of ``ClientCounts``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Make the counters."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            each.name: self._counter_cls(
                name=f"vllm:kvtide_{each.name}",
                documentation=f"kvtide connector: {each.name.replace('_', ' ')}",
                labelnames=labelnames,
            )
            for each in FIELDS
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._counters and value > 0:
                self._counters[name].labels(*labels).inc(value)


class _Shared:
    """What both roles have: the client, and the spaces of one or more ranks."""

    def __init__(self, config: Any, cache_config: Any, ranks: range) -> None:
        check_config(config)
        extra = config.kv_transfer_config.kv_connector_extra_config
        self.settings = connect_settings(dict(extra))
        log_beside_the_engine(self.settings.log_level)
        unit, hashed = resolve_kv_cache_block_sizes(cache_config, config)
        self.geometry = geometry(cache_config, unit, hashed)
        self.shapes = shapes(cache_config)
        spaces = [
            engine_spaces(config, cache_config, self.settings, vllm_version, rank)
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


class _Scheduling:
    """The scheduler's half."""

    def __init__(self, config: Any, cache_config: Any) -> None:
        ranks = range(config.parallel_config.tensor_parallel_size)
        self.shared = _Shared(config, cache_config, ranks)
        self._plan = PrefixPlan(self.shared.geometry, saves=self.shared.saves)
        self._asked: dict[str, int] = {}
        self._claims = Claims()
        # a draft's tokens may be taken back: save what the next step confirms
        self._drafts = config.speculative_config is not None

    def matched(self, request: Any, computed: int) -> int:
        """Tokens that every rank can load after ``computed``; never the last one."""
        claim = self._claims.of(request) if self.shared.loads else None
        if claim is None:
            return 0

        def hits(group: int, names: Any) -> int:
            count = len(names)
            for book in self.shared.books:
                if count:
                    keys = book.space(group, claim).keys(names[:count])
                    count = self.shared.client.exists(keys)
            return count

        self._asked[request.request_id] = computed
        return self.shared.geometry.hit_tokens(
            request.block_hashes, computed, request.num_tokens - 1, hits
        )

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """The engine gave it blocks, of which some are to be loaded."""
        claim = self._claims.of(request)
        start = self._asked.pop(request.request_id, 0)
        if claim is not None:
            self._plan.allocated(
                request.request_id,
                claim,
                request.block_hashes,
                blocks.get_block_ids(),
                (start, start + external),
            )

    def step(self, output: Any) -> KvtideMetadata:
        """What moves in this step."""
        for request in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            self._plan.finished(request)
            self._asked.pop(request, None)
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self._plan.begins(new.req_id, new.block_ids, new.num_computed_tokens)
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, request in enumerate(cached.req_ids):
            tables, start = cached.new_block_ids[i], cached.num_computed_tokens[i]
            if request in cached.resumed_req_ids:
                self._plan.begins(request, tables or (), start)
            elif tables is not None:
                self._plan.grows(request, tables)
            computed[request] = start
        saves: list[Task] = []
        for request, start in computed.items():
            new = 0 if self._drafts else output.num_scheduled_tokens[request]
            task = self._plan.computes(request, start, start + new)
            if task is not None:
                saves.append(task)
        return KvtideMetadata(self._plan.take_loads(), tuple(saves))

    def finished(self, request: str) -> None:
        """It ends; what is under way for it is vLLM's to wait for."""
        self._plan.finished(request)


class _Working:
    """A rank's half."""

    def __init__(self, config: Any, cache_config: Any) -> None:
        rank = _tensor_parallel_rank()
        self.shared = _Shared(config, cache_config, range(rank, rank + 1))
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


class KvtideConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. One object in the scheduler, one in each worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Join the cluster in the background; vLLM goes on to load its model.

        Raises:
            ConfigError: a setting or a feature of this vLLM can't be used.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduling: _Scheduling | None = None
        self._working: _Working | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduling = _Scheduling(vllm_config, kv_cache_config)
        else:
            self._working = _Working(vllm_config, kv_cache_config)

    @property
    def _shared(self) -> _Shared:
        half = self._scheduling or self._working
        assert half is not None  # noqa: S101 - one of the two is made
        return half.shared

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is a future miss, nothing more."""
        return False

    def get_kv_connector_stats(self) -> KvtideStats | None:
        """See the base class."""
        return self._shared.stats()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KvtideStats:
        """See the base class."""
        return KvtideStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvtidePromMetrics:
        """See the base class."""
        return KvtidePromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )

    def shutdown(self) -> None:
        """Leave the cluster, in bounded time."""
        if self._working is not None:
            self._working.close()
        self._shared.client.close()

    # ---- scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Asks nobody: the index answers at once."""
        assert self._scheduling is not None  # noqa: S101 - vLLM's contract
        count = self._scheduling.matched(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """See the base class."""
        assert self._scheduling is not None  # noqa: S101 - vLLM's contract
        self._scheduling.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See the base class."""
        assert self._scheduling is not None  # noqa: S101 - vLLM's contract
        return self._scheduling.step(scheduler_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Saves are over when their step is: blocks may be freed at once."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished``."""
        del block_ids
        assert self._scheduling is not None  # noqa: S101 - vLLM's contract
        self._scheduling.finished(request.request_id)
        return False, None

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """See the base class."""
        assert self._working is not None  # noqa: S101 - vLLM's contract
        self._working.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads; another thread does them."""
        del forward_context, kwargs
        metadata = self._get_connector_metadata()
        if self._working is not None and isinstance(metadata, KvtideMetadata):
            self._working.load(metadata.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests wait for all layers before they are scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Whole blocks are saved after the last layer."""

    def wait_for_save(self) -> None:
        """Save what this step has finished."""
        metadata = self._get_connector_metadata()
        if self._working is not None and isinstance(metadata, KvtideMetadata):
            self._working.save(metadata.saves)

    def get_transfer_results(
        self, finished_req_ids: set[str]
    ) -> KVConnectorTransferResults:
        """See the base class."""
        del finished_req_ids
        assert self._working is not None  # noqa: S101 - vLLM's contract
        return self._working.results()

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        """As ``get_transfer_results``, for runners that ask this way."""
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See the base class."""
        assert self._working is not None  # noqa: S101 - vLLM's contract
        return self._working.bad_blocks()


def _tensor_parallel_rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank  # noqa: PLC0415

    return int(get_tensor_model_parallel_rank())


__all__ = ["Claim", "KvtideConnector", "KvtideMetadata", "KvtideStats"]
