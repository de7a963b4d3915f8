# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false
"""SGLang's HiCache storage backend: its third tier is the pool.

    --enable-hierarchical-cache --hicache-mem-layout page_first
    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "kvtide", "module_path": "kvtide.connect.sglang",
      "class_name": "KvtideHiCache", "interface_v1": 1, "kvtide": {"nats": "nats://…"}}'

Written against SGLang 0.5.23. The zero-copy ``v1`` interface only: pages go between the
pool and SGLang's host memory in place. This module alone imports SGLang.
"""

import json
from pathlib import Path
from typing import Any

import structlog
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvtide.connect.client import EngineClient
from kvtide.connect.logs import log_beside_the_engine
from kvtide.connect.model_digest import folder_digest
from kvtide.connect.opaque_pages import OpaquePages
from kvtide.connect.settings import connect_settings
from kvtide.connect.shape import BlockShape
from kvtide.connect.space import EngineSpace
from kvtide.connect.versions import installed_version
from kvtide.runtime import ConfigError

log = structlog.get_logger("kvtide.connect")


class KvtideHiCache(HiCacheStorage):
    """One rank's backend. Every call is bounded and none raises for the pool."""

    def __init__(self, storage_config: Any, _more: Any = None) -> None:
        """Join the cluster in the background.

        Raises:
            ConfigError: a setting can't be used, or this kind of model is not supported.
        """
        extra = storage_config.extra_config or {}
        if not extra.get("interface_v1"):
            raise ConfigError(
                'only the zero-copy interface is supported: set "interface_v1": 1',
                key="interface_v1",
            )
        if storage_config.dcp_size > 1 or storage_config.should_split_heads:
            raise ConfigError(
                "decode context parallelism and split heads are not supported",
                key="dcp_size",
            )
        self._config = storage_config
        self._settings = connect_settings(dict(extra.get("kvtide", {})))
        log_beside_the_engine(self._settings.log_level)
        self._client = EngineClient(self._settings)
        self._pages: OpaquePages | None = None

    # ---- what SGLang sets up

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """These are SGLang's host pages; they give the shape of a block.

        Raises:
            ConfigError: its pages have no equal pieces.
        """
        self.mem_pool_host = mem_pool_host
        size = mem_pool_host.page_size
        _, sizes = mem_pool_host.get_page_buffer_meta(_first_page(size))
        if len(set(sizes)) != 1:
            raise ConfigError(
                f"a page in pieces of {sorted(set(sizes))} bytes can't be pooled",
                key="hicache_mem_layout",
            )
        shape = BlockShape(len(sizes), int(sizes[0]))
        space = self._client.space(self._space(mem_pool_host), shape)
        self._pages = OpaquePages(self._client, space)

    def close(self) -> None:
        """Leave the cluster, in bounded time."""
        self._client.close()

    # ---- the zero-copy interface

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Asks nobody: the index answers at once."""
        del extra_info
        if self._pages is None or self._settings.mode == "save":
            return 0
        return self._pages.exists(keys)

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """A page that can't be had is left as it is."""
        del extra_info
        if self._pages is None or not keys or self._settings.mode == "save":
            return [False] * len(keys)
        addresses, _ = self.mem_pool_host.get_page_buffer_meta(host_indices)
        return self._pages.load(keys, addresses)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """True for all or for none: what is missing is offered again some day."""
        del extra_info
        if self._pages is None or not keys or self._settings.mode == "load":
            return [False] * len(keys)
        if not self._config.is_storage_writer:
            return [True] * len(keys)
        addresses, _ = self.mem_pool_host.get_page_buffer_meta(host_indices)
        return [self._pages.save(keys, addresses)] * len(keys)

    def exists(self, key: str) -> bool:
        """See ``batch_exists``."""
        return self.batch_exists([key]) == 1

    # ---- the copying interface, which "interface_v1" replaces

    def get(self, *_given: Any, **_more: Any) -> None:
        """Nothing comes this way."""

    def batch_get(self, keys: list[str], *_given: Any, **_more: Any) -> list[None]:
        """Nothing comes this way."""
        return [None] * len(keys)

    def set(self, *_given: Any, **_more: Any) -> bool:
        """Nothing goes this way."""
        return False

    def batch_set(self, *_given: Any, **_more: Any) -> bool:
        """Nothing goes this way."""
        return False

    # ---- inside

    def _space(self, pool: Any) -> EngineSpace:
        config = self._config
        folder = Path(config.model_name or "")
        digest = self._settings.model_digest
        if not digest and not (config.model_name and folder.exists()):
            raise ConfigError(
                f"{config.model_name} is no folder here: give the model as a path, or "
                "its digest as 'model_digest'",
                key="model_digest",
            )
        facts = {
            "page": pool.page_size,
            "layout": pool.layout,
            "dtype": pool.dtype,
            # every fp8 is bytes to the host's pool
            "cache dtype": getattr(_device_pool(pool), "dtype", ""),
            "pool": type(_device_pool(pool)).__name__,
            "mla": config.is_mla_model,
            "layers": getattr(pool, "layer_num", 0),
            "heads": getattr(pool, "head_num", 0),
            "head": getattr(pool, "head_dim", 0),
            "configured": self._settings.numerics,
        }
        # ranks of an MLA model hold the same pages
        rank = "" if config.is_mla_model else f"tp{config.tp_rank}/{config.tp_size} "
        return EngineSpace(
            engine=f"sglang {installed_version('sglang')}",
            model=digest or folder_digest(folder, self._settings.state_dir / "digests"),
            numerics=json.dumps(facts, sort_keys=True, default=str),
            place=f"{rank}pp{config.pp_rank}/{config.pp_size} "
            f"cp{config.attn_cp_rank}/{config.attn_cp_size}",
        )


def _device_pool(pool: Any) -> Any:
    return getattr(pool, "device_pool", None)


def _first_page(size: int) -> Any:
    import torch  # noqa: PLC0415 - SGLang has it

    return torch.arange(size)
