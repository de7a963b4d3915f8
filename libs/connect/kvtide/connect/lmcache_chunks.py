# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
"""LMCache's chunks as blocks of the pool; imports LMCache only when it loads.

A block is a whole chunk of one rank, as its bytes lie in LMCache's own memory. Chunks that
are not full (the end of a prompt) are not pooled: their bytes have another shape.
"""

import importlib
import json
import threading
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, cast

import structlog

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

SETTINGS_KEY = "kvtide"
ENGINES = ("vllm", "sglang", "tensorrt_llm")
HASHES = ("sha256", "sha256_cbor")
_WHERE = ("vllm.utils.hashing", "vllm.utils")


class LmcacheChunks:
    """One rank's way to the pool. Every call is bounded and none raises for the pool.

    ``config`` and ``metadata`` are LMCache's. ``memory`` is its local CPU backend, None
    for a scheduler, which only looks up.
    """

    def __init__(self, config: Any, metadata: Any, memory: Any) -> None:
        """Join the cluster in the background.

        Raises:
            ConfigError: a setting can't be used, or this way of caching is not supported.
        """
        if config.use_layerwise:
            raise ConfigError(
                "chunks by layer are not supported: set use_layerwise to false",
                key="use_layerwise",
            )
        self._hashing = str(getattr(config, "pre_caching_hash_algorithm", ""))
        if self._hashing not in HASHES:
            raise ConfigError(
                f"chunk hashes by {self._hashing or 'an unknown way'} may collide between "
                "tenants: set pre_caching_hash_algorithm to sha256_cbor",
                key="pre_caching_hash_algorithm",
            )
        if not _vllm_hashes():
            raise ConfigError(
                "LMCache takes its sha256 from vLLM, which is not here, and falls back to "
                "Python's hash, which may collide between tenants: run it beside vLLM",
                key="pre_caching_hash_algorithm",
            )
        extra = cast("dict[str, Any]", config.extra_config or {})
        self._settings = connect_settings(dict(extra.get(SETTINGS_KEY, {})))
        log_beside_the_engine(self._settings.log_level)
        self._metadata = metadata
        self._memory = memory
        self._model = self._digest(metadata.model_name)
        self._lock = threading.Lock()
        self._facts = ""
        self._pages: OpaquePages | None = None
        self._nbytes = 0
        self.client = EngineClient(self._settings)

    def close(self) -> None:
        """Leave the cluster, in bounded time."""
        self.client.close()

    def exists(self, keys: Sequence[Any]) -> int:
        """How many chunks, from the first on, are in the pool. Asks nobody."""
        if self._settings.mode == "save":
            return 0
        return self._now().exists(_names(keys))

    def keep(self, keys: Sequence[Any]) -> None:
        """Have the stores keep these for a while (``lease_s``); waits for nothing."""
        space = self._now().space
        self.client.keep(space.keys([name.encode() for name in _names(keys)]))

    def save(self, keys: Sequence[Any], chunks: Sequence[Any]) -> list[bool]:
        """Offer chunks; which of them are pooled now, or were.

        When it returns the chunks' memory is read no more. A chunk that is not full is
        not taken. Of the others all count, or none.
        """
        pages = self._now()
        full = [chunk.get_size() == self._nbytes for chunk in chunks]
        if self._settings.mode == "load" or not any(full):
            return [False] * len(keys)
        taken = [
            (key, chunk)
            for key, chunk, ok in zip(keys, chunks, full, strict=True)
            if ok
        ]
        addresses = self._addresses([chunk for _, chunk in taken])
        saved = pages.save(_names([key for key, _ in taken]), addresses)
        return [ok and saved for ok in full]

    def load(self, keys: Sequence[Any]) -> list[Any]:
        """LMCache's memory with each chunk that could be had, verified; else None.

        The caller owns what it gets, with one reference each.
        """
        pages = self._now()
        chunks: list[Any] = []
        if self._memory is not None and keys:
            chunks = self._room(min(len(keys), self.exists(keys)))
        if not chunks:
            return [None] * len(keys)
        had: Sequence[bool] = [False] * len(chunks)
        try:
            names = _names(keys[: len(chunks)])
            had = pages.load(names, self._addresses(chunks))
        finally:
            for chunk, ok in zip(chunks, had, strict=True):
                if not ok:
                    chunk.ref_count_down()
        loaded = [chunk if ok else None for chunk, ok in zip(chunks, had, strict=True)]
        return [*loaded, *[None] * (len(keys) - len(chunks))]

    def _room(self, count: int) -> list[Any]:
        """Memory for so many chunks, or as many as LMCache has room for."""
        metadata = self._metadata
        form = _form(metadata)
        chunks: list[Any] = []
        for _ in range(count):
            chunk = self._memory.allocate(
                metadata.get_shapes(), metadata.get_dtypes(), form, busy_loop=False
            )
            if chunk is None:
                log.info("no_room_in_lmcache", chunks=count)
                break
            chunks.append(chunk)
        return chunks

    def _addresses(self, chunks: Sequence[Any]) -> list[int]:
        """The start of each piece of each chunk."""
        shape = self._now().space.shape
        return [
            int(chunk.data_ptr) + piece * shape.piece_bytes
            for chunk in chunks
            for piece in range(shape.pieces)
        ]

    # ---- the space

    def _now(self) -> OpaquePages:
        """The pages, as LMCache knows its layers now: it learns of some later."""
        metadata = self._metadata
        shapes = [list(map(int, shape)) for shape in metadata.get_shapes()]
        dtypes = metadata.get_dtypes()
        facts = json.dumps(
            {
                "shapes": shapes,
                "dtypes": [str(dtype) for dtype in dtypes],
                "chunk": metadata.chunk_size,
                "mla": metadata.use_mla,
                "hash": self._hashing,
                "configured": self._settings.numerics,
            },
            sort_keys=True,
        )
        with self._lock:
            if self._pages is None or facts != self._facts:
                pairs = zip(shapes, dtypes, strict=True)
                self._nbytes = sum(
                    prod(shape) * dtype.itemsize for shape, dtype in pairs
                )
                # one layer's K or V a piece, where all are equal
                pieces = prod(shapes[0][:2]) if len(shapes) == 1 else 1
                shape = BlockShape(pieces, self._nbytes // pieces)
                space = self.client.space(self._space(facts), shape)
                self._facts, self._pages = facts, OpaquePages(self.client, space)
            return self._pages

    def _space(self, facts: str) -> EngineSpace:
        metadata = self._metadata
        # the rank is in LMCache's own name of a chunk too; ranks of MLA share chunks
        place = (
            "" if metadata.use_mla else f"{metadata.worker_id}/{metadata.world_size}"
        )
        # LMCache moves what the engine around it has computed
        engine = installed_version("lmcache", *ENGINES)
        return EngineSpace(engine, self._model, facts, place)

    def _digest(self, model: str | None) -> str:
        settings = self._settings
        if settings.model_digest:
            return settings.model_digest
        folder = Path(model or "")
        if not (model and folder.exists()):
            raise ConfigError(
                f"{model} is no folder here: give the model as a path, or its digest as "
                "'model_digest'",
                key="model_digest",
            )
        return folder_digest(folder, settings.state_dir / "digests")


def _names(keys: Sequence[Any]) -> list[str]:
    return [str(key.to_string()) for key in keys]


def _vllm_hashes() -> bool:
    """Whether LMCache gets the hash that it was told: without vLLM it only warns."""
    for name in _WHERE:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if any(hasattr(module, each) for each in ("get_hash_fn_by_name", *HASHES)):
            return True
    return False


def _form(metadata: Any) -> Any:
    """LMCache's name for how a chunk's bytes are ordered."""
    from lmcache.v1.memory_management import MemoryFormat  # noqa: PLC0415 - it is there then

    return MemoryFormat.KV_MLA_FMT if metadata.use_mla else MemoryFormat.KV_2LTD
