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
verified. Only modules named ``vllm…`` import vLLM, and not all of them.
"""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.version import __version__ as vllm_version

from kvtide.connect.prefix_plan import Claim, PrefixPlan, Prompt, Task
from kvtide.connect.vllm_facts import (
    Claims,
    model_digest,
    served_facts,
)
from kvtide.connect.vllm_handover import (
    ENDED_WELL,
    Waits,
    answer_params,
    is_for_handover,
    offer_of,
    prompt_of,
)
from kvtide.connect.vllm_metrics import KvtidePromMetrics, KvtideStats
from kvtide.connect.vllm_names import RequestNames
from kvtide.connect.vllm_rank import Rank
from kvtide.connect.vllm_shared import KvtideMetadata, Shared
from kvtide.runtime import SystemClock


@dataclass(slots=True)
class _Asked:
    """What was answered for a request: its tokens before, and the prompt if all of it."""

    computed: int
    prompt: Prompt | None = None


class _Scheduling:
    """The scheduler's half."""

    def __init__(self, config: Any, cache_config: Any) -> None:
        ranks = range(config.parallel_config.tensor_parallel_size)
        self.shared = Shared(config, cache_config, ranks)
        self._engine = str(config.kv_transfer_config.engine_id)
        self._clock = SystemClock()
        self._plan = PrefixPlan(self.shared.geometry, saves=self.shared.saves)
        self._asked: dict[str, _Asked] = {}
        self._loaded: set[str] = set()
        settings, facts = self.shared.settings, None
        if settings.keys_of == "gateway":
            digest = model_digest(config, settings)
            tokens = self.shared.geometry.attending_tokens
            facts = served_facts(config, vllm_version, digest, tokens)
        client = self.shared.client
        self._names = RequestNames(self.shared.geometry, facts, client.gateway_keys)
        self._waits = Waits(self.shared.settings.handover_wait_s)
        self._claims = Claims()
        # a draft's tokens may be taken back: save what the next step confirms
        self._drafts = config.speculative_config is not None

    def matched(self, request: Any, computed: int) -> int | None:
        """Tokens that every rank can load after ``computed``; None: ask again.

        Never the last token, unless a prefill instance has left the whole prompt. A
        request loads once: vLLM asks again where it got nothing, and would get nothing
        for as long as a store that can't be read is thought to have its blocks.
        """
        claim = self._claims.of(request) if self.shared.loads else None
        geometry, name = self.shared.geometry, request.request_id
        if claim is None or name in self._loaded:
            return 0
        hashes = self._names.of(request, claim)

        def hits(group: int, names: Any) -> int:
            count = len(names)
            for book in self.shared.books:
                if count:
                    keys = book.space(group, claim).keys(names[:count])
                    count = self.shared.client.exists(keys)
            return count

        self._asked[name] = _Asked(computed)
        prompt = self._offered(request)
        if prompt is not None and computed < prompt.tokens:
            found = geometry.prompt_tokens(hashes, prompt, computed, hits)
            if found:
                self._asked[name].prompt = prompt
                return found
            joined = self.shared.client.joined
            if joined and self._waits.may_wait(name, self._clock.monotonic()):
                return None
        limit = request.num_tokens - 1
        return geometry.hit_tokens(hashes, computed, limit, hits)

    def _offered(self, request: Any) -> Prompt | None:
        """The prompt that a prefill instance has left, if it is this one."""
        offer = offer_of(request.kv_transfer_params)
        if offer is None:
            return None
        prompt = prompt_of(request, self.shared.geometry.hash_tokens)
        return prompt if prompt is not None and offer.is_of(prompt) else None

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """The engine gave it blocks, of which some are to be loaded."""
        self._waits.ended(request.request_id)
        claim = self._claims.of(request)
        asked = self._asked.pop(request.request_id, _Asked(0))
        if external:
            self._loaded.add(request.request_id)
        params, handover = request.kv_transfer_params, None
        if is_for_handover(params):
            handover = prompt_of(request, self.shared.geometry.hash_tokens)
        elif offer_of(params) is not None:
            # it is taken once: what fails then is computed
            request.kv_transfer_params = {**params, "do_remote_prefill": False}
        if claim is not None:
            start = asked.computed
            self._plan.allocated(
                request.request_id,
                claim,
                self._names.of(request, claim),
                blocks.get_block_ids(),
                (start, start + external),
                loaded=asked.prompt if external else None,
                handover=handover,
            )

    def step(self, output: Any) -> KvtideMetadata:
        """What moves in this step."""
        for request in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            self._forget(request)
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
            end = start + output.num_scheduled_tokens[request]
            if self._drafts:
                end = max(start, self._plan.certain(request, end))
            task = self._plan.computes(request, start, end)
            if task is not None:
                saves.append(task)
        return KvtideMetadata(
            self._plan.take_loads(),
            tuple(saves),
            idle=not output.total_num_scheduled_tokens,
            awaits=len(self._waits) > 0,
        )

    def finished(self, request: Any) -> dict[str, Any] | None:
        """It ends; what is under way for it is vLLM's to wait for.

        The answer's ``kv_transfer_params`` where another instance is to go on.
        """
        name = request.request_id
        prompt = self._plan.handed_over(name)
        self._forget(name)
        if prompt is None or request.status.name not in ENDED_WELL:
            return None
        lease_s = self.shared.settings.lease_s
        return answer_params(self._engine, name, prompt, lease_s)

    def reset(self) -> None:
        """Find nothing of before, and save nothing more of requests that run."""
        self._claims.renew()
        self._plan.disown()
        self._names.clear()

    def _forget(self, request: str) -> None:
        self._plan.finished(request)
        self._names.forget(request)
        self._waits.ended(request)
        self._asked.pop(request, None)
        self._loaded.discard(request)


class KvtideConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. One object in the scheduler, one in each worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Join the cluster in the background; vLLM goes on to load its model.

        Raises:
            ConfigError: a setting or a feature of this vLLM can't be used.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduling: _Scheduling | None = None
        self._working: Rank | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduling = _Scheduling(vllm_config, kv_cache_config)
        else:
            self._working = Rank(vllm_config, kv_cache_config)

    @property
    def _shared(self) -> Shared:
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
        return count, bool(count)

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
        return False, self._scheduling.finished(request)

    def reset_cache(self) -> bool:
        """Whoever asks has other weights, or wants a cold start.

        Blocks in the pool stay: other instances compute as they did.
        """
        assert self._scheduling is not None  # noqa: S101 - vLLM's contract
        self._scheduling.reset()
        return True

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
        metadata = self._get_connector_metadata()
        if isinstance(metadata, KvtideMetadata):
            self._working.pause(metadata)
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


__all__ = ["Claim", "KvtideConnector", "KvtideMetadata", "KvtideStats"]
