# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false
"""LMCache on the pool: a storage plugin, and the same as a remote connector.

    storage_plugins: ["kvtide"]
    extra_config:
      storage_plugin.kvtide.module_path: kvtide.connect.lmcache
      storage_plugin.kvtide.class_name: KvtideStorage
      kvtide: {nats: "nats://127.0.0.1:4222"}

or ``remote_storage_plugins: ["kvtide"]`` with ``remote_storage_plugin.kvtide.class_name:
KvtideAdapter``. Written against LMCache 0.5.6. This module alone imports LMCache.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface
from lmcache.v1.storage_backend.connector import ConnectorAdapter
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvtide.connect.lmcache_chunks import LmcacheChunks

log = structlog.get_logger("kvtide.connect")

Saved = Callable[[Any], None]
"""Called with the key of a chunk that was saved."""


class KvtideStorage(StoragePluginInterface):
    """One rank's storage plugin. Every call is bounded and none raises for the pool."""

    def __init__(
        self,
        dst_device: str = "cpu",
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: Any = None,
    ) -> None:
        """Join the cluster in the background; LMCache calls this.

        Raises:
            ConfigError: a setting can't be used, or this way of caching is not supported.
        """
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        self._chunks = LmcacheChunks(config, metadata, local_cpu_backend)

    def __str__(self) -> str:
        """Its name in LMCache's logs."""
        return type(self).__name__

    # ---- looking up

    def contains(self, key: Any, pin: bool = False) -> bool:
        """Asks nobody: the index answers at once."""
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: list[Any], pin: bool = False) -> int:
        """How many, from the first on; with ``pin`` the stores keep them for a while."""
        count = self._chunks.exists(keys)
        if pin and count:
            self._chunks.keep(keys[:count])
        return count

    async def batched_async_contains(
        self, lookup_id: str, keys: list[Any], pin: bool = False
    ) -> int:
        """See ``batched_contains``."""
        del lookup_id
        return self.batched_contains(keys, pin)

    def exists_in_put_tasks(self, key: Any) -> bool:
        """Saves are over when they return."""
        del key
        return False

    # ---- saving and loading

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Saved | None = None,
    ) -> None:
        """Copy into the store's slots, within ``save_timeout_s``; else drop them."""
        del transfer_spec
        for key, saved in zip(keys, self._chunks.save(keys, objs), strict=True):
            if saved and on_complete_callback is not None:
                _tell(on_complete_callback, key)

    async def async_batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Saved | None = None,
    ) -> None:
        """See ``batched_submit_put_task``."""
        await asyncio.to_thread(
            self.batched_submit_put_task,
            keys,
            objs,
            transfer_spec,
            on_complete_callback,
        )

    def get_blocking(self, key: Any) -> Any:
        """The chunk in LMCache's memory, or None, within ``load_timeout_s``."""
        return self._chunks.load([key])[0]

    def batched_get_blocking(self, keys: list[Any]) -> list[Any]:
        """See ``get_blocking``; all together within that time."""
        return self._chunks.load(keys)

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[Any], transfer_spec: Any = None
    ) -> list[Any]:
        """Those that could be had, from the first on."""
        del lookup_id, transfer_spec
        return _prefix(await asyncio.to_thread(self._chunks.load, keys))

    # ---- keeping

    def pin(self, key: Any) -> bool:
        """Kept for ``lease_s`` at most, should ``unpin`` never come."""
        self._chunks.keep([key])
        return True

    def unpin(self, key: Any) -> bool:
        """The lease ends by itself."""
        del key
        return True

    def remove(self, key: Any, force: bool = True) -> bool:
        """What leaves the pool is the stores' to decide."""
        del key, force
        return False

    def touch_cache(self) -> None:
        """The stores see what is read."""

    def get_allocator_backend(self) -> Any:
        """LMCache's own CPU memory: chunks are loaded into it."""
        return self.local_cpu_backend

    def close(self) -> None:
        """Leave the cluster, in bounded time."""
        self._chunks.close()


class KvtideConnector(RemoteConnector):
    """One rank's remote connector. Made by ``KvtideAdapter``."""

    def __init__(self, config: Any, metadata: Any, local_cpu_backend: Any) -> None:
        """Join the cluster in the background; raises as ``KvtideStorage``."""
        super().__init__(config, metadata)
        self._chunks = LmcacheChunks(config, metadata, local_cpu_backend)

    async def exists(self, key: Any) -> bool:
        """Asks nobody: the index answers at once."""
        return self.exists_sync(key)

    def exists_sync(self, key: Any) -> bool:
        """See ``exists``."""
        return self._chunks.exists([key]) == 1

    def support_batched_contains(self) -> bool:
        """It is one question."""
        return True

    def batched_contains(self, keys: list[Any]) -> int:
        """How many, from the first on."""
        return self._chunks.exists(keys)

    async def batched_async_contains(
        self, lookup_id: str, keys: list[Any], pin: bool = False
    ) -> int:
        """See ``batched_contains``; with ``pin`` the stores keep them for a while."""
        del lookup_id
        count = self._chunks.exists(keys)
        if pin and count:
            self._chunks.keep(keys[:count])
        return count

    async def get(self, key: Any) -> Any:
        """The chunk in LMCache's memory, or None, within ``load_timeout_s``."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        """A prompt's chunks are one batch."""
        return True

    async def batched_get(self, keys: list[Any]) -> list[Any]:
        """See ``get``; all together within that time."""
        return await asyncio.to_thread(self._chunks.load, keys)

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[Any]
    ) -> list[Any]:
        """Those that could be had, from the first on."""
        del lookup_id
        return _prefix(await self.batched_get(keys))

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Copy into the store's slots, within ``save_timeout_s``; else drop it."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        """A prompt's chunks are one batch."""
        return True

    async def batched_put(self, keys: list[Any], memory_objs: list[Any]) -> None:
        """See ``put``; LMCache counts the references down after it."""
        await asyncio.to_thread(self._chunks.save, keys, memory_objs)

    def remove_sync(self, key: Any) -> bool:
        """What leaves the pool is the stores' to decide."""
        del key
        return False

    async def list(self) -> list[str]:
        """Nothing: keys of the pool don't tell names."""
        return []

    async def close(self) -> None:
        """Leave the cluster, in bounded time."""
        await asyncio.to_thread(self._chunks.close)


class KvtideAdapter(ConnectorAdapter):
    """What LMCache makes the connector by, for ``plugin://kvtide``."""

    def __init__(self) -> None:
        """LMCache calls this."""
        super().__init__("plugin://kvtide")

    def create_connector(self, context: Any) -> KvtideConnector:
        """One for each rank; raises as ``KvtideStorage``."""
        scheduler = getattr(context.metadata, "role", None) == "scheduler"
        memory = None if scheduler else context.local_cpu_backend
        return KvtideConnector(context.config, context.metadata, memory)


def _tell(callback: Saved, key: Any) -> None:
    try:
        callback(key)
    except Exception:
        # LMCache's contract: what a callback raises is logged
        log.exception("callback_failed")


def _prefix(chunks: Sequence[Any]) -> list[Any]:
    """Those before the first that is missing; the rest is given back."""
    for at, chunk in enumerate(chunks):
        if chunk is None:
            for each in chunks[at:]:
                if each is not None:
                    each.ref_count_down()
            return list(chunks[:at])
    return list(chunks)
