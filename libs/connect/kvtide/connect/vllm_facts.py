# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
"""What of vLLM's configuration goes into keys and plans; imports neither vLLM nor torch.

Scheduler and workers are apart and must come to the same keys, so everything here is
made from what both are given.
"""

import json
import platform
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from blake3 import blake3

from kvtide.connect.model_digest import folder_digest, folder_stamp
from kvtide.connect.prefix_plan import Claim, Geometry, Group
from kvtide.connect.settings import ConnectSettings
from kvtide.connect.shape import FOREIGN_LAYOUT, BlockShape
from kvtide.connect.space import EngineSpace
from kvtide.kv import Layout, ModelFacts
from kvtide.kv.layout import MAX_BLOCK_TOKENS, MIN_BLOCK_TOKENS
from kvtide.runtime import ConfigError

MAX_ADAPTERS = 1024
CPU_INFO = Path("/proc/cpuinfo")
PACKING = ("amx_tile", "amx_bf16", "avx512f", "avx512_bf16", "avx2", "asimd", "sve")
"""Instructions that kernels choose an order of numbers by."""
SALTED = "\x1f"
"""In a ``cache_salt``: between a tenant and a salt that narrows, if there is one."""

RENEWED = "\x1e"
"""In a claim's salt: before what tells apart what was computed since a reset."""

SAFE_HASHES = ("sha256", "sha256_cbor")
WHOLE = ("FullAttentionSpec", "MLAAttentionSpec")
WINDOWED = ("SlidingWindowSpec", "SlidingWindowMLASpec")


def check_config(config: Any) -> None:
    """Refuse what can't work, before the engine serves.

    Raises:
        ConfigError: it says which flag to change.
    """
    transfer, cache = config.kv_transfer_config, config.cache_config
    parallel = config.parallel_config
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "a block that is gone must be computed, not fail its request: set "
            '"kv_load_failure_policy": "recompute" in --kv-transfer-config',
            key="kv_load_failure_policy",
        )
    if cache.prefix_caching_hash_algo not in SAFE_HASHES:
        raise ConfigError(
            f"block hashes by {cache.prefix_caching_hash_algo} may collide between "
            "tenants: start with --prefix-caching-hash-algo sha256_cbor",
            key="prefix_caching_hash_algo",
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name} above 1 is not supported", key=name)
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            "pipeline parallelism is not supported", key="pipeline_parallel_size"
        )


def geometry(cache_config: Any, unit_tokens: int, hash_tokens: int) -> Geometry:
    """The groups of the cache.

    Raises:
        ConfigError: one can't be addressed by block hashes, or not yet.
    """
    groups: list[Group] = []
    for number, group in enumerate(cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        kind = type(spec).__name__
        eagle = bool(getattr(group, "is_eagle_group", False))
        if kind not in (*WHOLE, *WINDOWED) or eagle:
            what = "a draft model's group" if eagle else kind
            raise ConfigError(
                f"KV cache group {number} is {what}, which can't be pooled yet",
                key="kv_cache_groups",
            )
        window = int(spec.sliding_window) if kind in WINDOWED else None
        groups.append(Group(int(spec.block_size), window))
    return Geometry(tuple(groups), hash_tokens, unit_tokens)


def shapes(cache_config: Any) -> tuple[BlockShape, ...]:
    """A block of each group: a page of each of its layers."""
    return tuple(
        BlockShape(len(group.layer_names), int(group.kv_cache_spec.page_size_bytes))
        for group in cache_config.kv_cache_groups
    )


def engine_spaces(
    config: Any,
    cache_config: Any,
    settings: ConnectSettings,
    version: str,
    rank: int,
    leader: int,
) -> tuple[EngineSpace, ...]:
    """The spaces of one tensor-parallel rank, by group; ``leader`` is one of them.

    Raises:
        ConfigError: the model's files can't be found or read.
    """
    digest = model_digest(config, settings)
    size = config.parallel_config.tensor_parallel_size
    return tuple(
        EngineSpace(
            engine=f"vllm {version}",
            model=digest,
            numerics=_numerics(config, cache_config, group),
            place=f"tp{rank}/{size} group{number}",
            adopts=rank == 0 and number == leader,
        )
        for number, group in enumerate(cache_config.kv_cache_groups)
    )


@dataclass(frozen=True, slots=True)
class _Adapter:
    """What is known of an adapter; both "": nothing of it is pooled."""

    stamp: str
    digest: str


class Claims:
    """Whose the blocks of requests are; remembers the digests of adapters.

    vLLM loads an adapter once for each of its numbers, so its files are read once too.
    If they change after that, what vLLM computes with is not known: it may be the files
    as they were, or as they are. Nothing of that adapter is pooled then.
    """

    def __init__(self) -> None:
        """No adapter is known."""
        self._adapters: OrderedDict[tuple[object, ...], _Adapter] = OrderedDict()
        self._renewed = ""

    def renew(self) -> None:
        """What was computed before holds no more: the weights may have been replaced.

        By what is not known, so what is pooled from now on is found by this engine alone.
        """
        self._adapters.clear()
        self._renewed = RENEWED + secrets.token_hex(16)

    def of(self, request: Any) -> Claim | None:
        """A request's claim; None: nothing of it may be pooled."""
        lora = getattr(request, "lora_request", None)
        adapter = "" if lora is None else self._digest(lora)
        if lora is not None and not adapter:
            return None
        tenant, _, salt = (getattr(request, "cache_salt", None) or "").partition(SALTED)
        return Claim(tenant, adapter, salt + self._renewed)

    def _digest(self, lora: Any) -> str:
        """The adapter's digest, "" if its files can't be read here or have changed."""
        name = (lora.lora_int_id, lora.lora_name, lora.lora_path)
        folder = Path(lora.lora_path)
        try:
            stamp = folder_stamp(folder)
            known = self._adapters.pop(name, None)
            if known is None:
                known = _Adapter(stamp, folder_digest(folder))
            elif known.stamp != stamp:
                known = _Adapter("", "")
        except ConfigError:
            known = _Adapter("", "")
        self._adapters[name] = known
        if len(self._adapters) > MAX_ADAPTERS:
            self._adapters.popitem(last=False)
        return known.digest


def model_digest(config: Any, settings: ConnectSettings) -> str:
    """The digest of the model's content.

    Raises:
        ConfigError: none is given, and the files can't be found or read.
    """
    if settings.model_digest:
        return settings.model_digest
    folder = Path(config.model_config.model)
    if not folder.exists():
        raise ConfigError(
            f"{folder} is no folder here: give the model as a path, or its digest as "
            "'model_digest' in kv_connector_extra_config",
            key="model_digest",
        )
    return folder_digest(folder, settings.state_dir / "digests")


def served_facts(
    config: Any, version: str, digest: str, attending_tokens: int | None
) -> ModelFacts:
    """What a worker on this vLLM announces, and what gateways make keys from.

    The worker and the connector inside its engine make it apart, from one configuration.
    ``attending_tokens`` are in a block of the groups that attend to all, None if there
    are none or they differ; then, or if a block of the pool can't have so many, blocks
    are as large as the smallest group's.

    Raises:
        ConfigError: nor can they be so large.
    """
    cache, about, parallel = (
        config.cache_config,
        config.model_config,
        config.parallel_config,
    )
    more = {
        **_computing(config),
        "ranks": parallel.tensor_parallel_size,
        "one group": bool(config.scheduler_config.disable_hybrid_kv_cache_manager),
    }
    rest = blake3(json.dumps(more, sort_keys=True, default=str).encode()).hexdigest()
    said = f"{version}/{about.dtype}/{cache.cache_dtype}/{rest[:32]}"
    sizes = (attending_tokens or 0, int(cache.block_size))
    facts = ModelFacts(
        name=Path(about.model).resolve().name,
        digest=digest,
        layers=int(about.get_num_layers(parallel)),
        kv_heads=int(about.get_total_num_kv_heads()),
        head_dim=int(about.get_head_size()),
        kv_dtype=str(about.dtype).removeprefix("torch."),
        vocab_size=int(about.get_vocab_size()),
        max_tokens=int(about.max_model_len),
        eos_token_ids=_ends(about),
        numerics=f"foreign/vllm {said}",
        layout_version=FOREIGN_LAYOUT,
        block_tokens=next(filter(_poolable, sizes), sizes[-1]),
    )
    try:
        Layout.of(facts)
    except ValueError as error:
        raise ConfigError(
            f"gateways can't know blocks of this vLLM: {error}", key="block_size"
        ) from error
    return facts


def _poolable(tokens: int) -> bool:
    """Whether a block of the pool may have so many tokens."""
    in_range = MIN_BLOCK_TOKENS <= tokens <= MAX_BLOCK_TOKENS
    return in_range and tokens & (tokens - 1) == 0


def _ends(about: Any) -> tuple[int, ...]:
    """The ids that end an answer, by the model's own generation settings."""
    found: set[int] = set()
    generation = about.try_get_generation_config() or {}
    for source in (
        generation.get("eos_token_id"),
        getattr(about.hf_text_config, "eos_token_id", None),
    ):
        if isinstance(source, int):
            found.add(source)
        elif isinstance(source, list):
            found.update(map(int, source))
    return tuple(sorted(found))


def _numerics(config: Any, cache_config: Any, group: Any) -> str:
    """Canonical text of what changes a page's bytes beside the weights."""
    model, spec = config.model_config, group.kv_cache_spec
    facts = {
        **_computing(config),
        "dtype": model.dtype,
        "spec": type(spec).__name__,
        # all of it: formats of one size differ in more and more of its fields
        **_fields(spec),
        # every fp8 is bytes to the spec
        "cache dtype": config.cache_config.cache_dtype,
        "skipped": _told(config.cache_config, "kv_cache_dtype_skip_layers"),
        "backend": _told(config, "attention_config"),
        "layout": config.cache_config.kv_cache_layout,
        "layers": list(group.layer_names),
        "groups": len(cache_config.kv_cache_groups),
    }
    return json.dumps(facts, sort_keys=True, default=str)


def _fields(spec: Any) -> dict[str, str]:
    names = (each.name for each in fields(spec)) if is_dataclass(spec) else vars(spec)
    return {f"spec.{name}": str(getattr(spec, name)) for name in names}


def _told(config: Any, name: str) -> str:
    return str(getattr(config, name, ""))


def _computing(config: Any) -> dict[str, Any]:
    """What changes KV beside weights and numbers' formats, wherever it is asked."""
    model = config.model_config
    return {
        "quantization": model.quantization,
        "config": _content(model.hf_config.to_dict()),
        "device": config.device_config.device_type,
        "machine": _machine(config),
    }


def _content(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without where it was read from, and by which library."""
    return {
        key: _content(cast("dict[str, Any]", value))
        if isinstance(value, dict)
        else value
        for key, value in config.items()
        if key not in ("_name_or_path", "transformers_version")
    }


def _machine(config: Any) -> str:
    """On a CPU its kind: attention packs a page as the instructions like it."""
    if config.device_config.device_type != "cpu":
        return ""
    try:
        words = set(CPU_INFO.read_text().split())
    except OSError:
        words = set[str]()
    return " ".join((platform.machine(), *(each for each in PACKING if each in words)))
