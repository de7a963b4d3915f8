"""LMCache's storage plugin and remote connector on a real pool, under LMCache's own classes.

Runs where ``KVTIDE_TEST_LMCACHE`` names folders (separated by ":") with LMCache's unpacked
wheel and the few packages that it imports and kvtide's environment lacks; see
docs/connect/lmcache.md. LMCache itself makes and calls what is tested, in its own memory.
"""

import asyncio
import importlib
import os
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.cluster import Cluster, wait_for

FOLDERS = os.environ.get("KVTIDE_TEST_LMCACHE", "")  # noqa: TID251 - a test's own
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not FOLDERS, reason="KVTIDE_TEST_LMCACHE names no wheel"),
]
STORE = {"store": {"dram_bytes": 64 << 20, "slab_bytes": 2 << 20}}
LAYERS, CHUNK, HEADS, HEAD = 3, 16, 2, 32


def _digest(content: object) -> bytes:
    return sha256(repr(content).encode()).digest()


@pytest.fixture(scope="module", autouse=True)
def lmcache() -> Generator[None]:
    folders = FOLDERS.split(":")
    sys.path[:0] = folders
    # LMCache takes its hashes from vLLM, which is not here
    hashing: Any = types.ModuleType("vllm.utils.hashing")
    hashing.sha256_cbor = _digest
    sys.modules[hashing.__name__] = hashing
    yield
    del sys.modules[hashing.__name__]
    for folder in folders:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with Cluster(folder, prefill=0, decode=0, settings=STORE) as made:
        made.wait_ready()
        yield made


@pytest.fixture
def loop() -> Generator[asyncio.AbstractEventLoop]:
    """The one that LMCache's engine has in a thread."""
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(10)
    made.close()


class Rank:
    """One rank of an engine with LMCache: its configuration and CPU memory."""

    def __init__(
        self, cluster: Cluster, loop: asyncio.AbstractEventLoop, worker: int = 0
    ) -> None:
        config_of = importlib.import_module("lmcache.v1.config").LMCacheEngineConfig
        metadata_of = importlib.import_module("lmcache.v1.metadata").LMCacheMetadata
        memory_of = importlib.import_module(
            "lmcache.v1.storage_backend.local_cpu_backend"
        ).LocalCPUBackend
        self.config = config_of.from_defaults(
            chunk_size=CHUNK,
            local_cpu=False,
            max_local_cpu_size=0.05,
            pre_caching_hash_algorithm="sha256_cbor",
            storage_plugins=["kvtide"],
            remote_storage_plugins=["kvtide"],
            extra_config={
                "storage_plugin.kvtide.module_path": "kvtide.connect.lmcache",
                "storage_plugin.kvtide.class_name": "KvtideStorage",
                "remote_storage_plugin.kvtide.module_path": "kvtide.connect.lmcache",
                "remote_storage_plugin.kvtide.class_name": "KvtideAdapter",
                "kvtide": {
                    "nats": cluster.nats.url,
                    "state_dir": str(cluster.state_dir),
                    "shm_dir": str(cluster.shm_dir()),
                    "model_digest": "d1",
                    "save_timeout_s": 5.0,
                    "load_timeout_s": 5.0,
                },
            },
        )
        self.metadata = metadata_of(
            model_name="a model",
            world_size=2,
            local_world_size=2,
            worker_id=worker,
            local_worker_id=worker,
            kv_dtype=torch.bfloat16,
            kv_shape=(LAYERS, 2, CHUNK, HEADS, HEAD),
            chunk_size=CHUNK,
        )
        self.loop = loop
        self.memory = memory_of(self.config, self.metadata, "cpu")

    def plugin(self) -> Any:
        """As LMCache's launcher makes it."""
        storage = importlib.import_module("lmcache.v1.storage_backend")
        made: OrderedDict[str, Any] = OrderedDict()
        storage.storage_plugin_launcher(
            self.config, self.metadata, self.loop, self.memory, "cpu", made
        )
        return joined(made["kvtide"], made["kvtide"]._chunks)

    def remote(self) -> Any:
        """LMCache's remote backend over our connector."""
        module = importlib.import_module("lmcache.v1.storage_backend.remote_backend")
        made = module.RemoteBackend(
            self.config, self.metadata, self.loop, self.memory, "cpu", "kvtide"
        )
        connector = made.connection
        connector = getattr(connector, "_connector", connector)
        return joined(made, connector._chunks)

    def key(self, number: int, tags: dict[str, str] | None = None) -> Any:
        key_of = importlib.import_module("lmcache.utils").CacheEngineKey
        worker = self.metadata.worker_id
        return key_of(
            "a model", 2, worker, 1 << 60 | number, torch.bfloat16, tags or {}
        )

    def chunk(self, number: int, tokens: int = CHUNK) -> Any:
        made = self.memory.allocate(
            self.metadata.get_shapes(tokens), self.metadata.get_dtypes()
        )
        made.tensor.copy_(content(number, tokens))
        return made


def content(number: int, tokens: int = CHUNK) -> torch.Tensor:
    made = torch.Generator().manual_seed(number)
    shape = (2, LAYERS, tokens, HEADS * HEAD)
    return torch.randn(shape, generator=made).to(torch.bfloat16)


def joined(made: Any, chunks: Any) -> Any:
    wait_for(lambda: chunks.client.takes_blocks, "it found its store")
    return made


@pytest.fixture(params=["plugin", "remote"])
def make(
    request: pytest.FixtureRequest, cluster: Cluster, loop: asyncio.AbstractEventLoop
) -> Generator[Callable[..., tuple[Rank, Any]]]:
    made: list[Any] = []

    def one(worker: int = 0, **more: str) -> tuple[Rank, Any]:
        rank = Rank(cluster, loop, worker)
        rank.config.extra_config["kvtide"].update(more)
        backend = getattr(rank, request.param)()
        made.append(backend)
        return rank, backend

    yield one
    for each in made:
        each.close()


def saved(backend: Any, keys: Sequence[Any], chunks: list[Any]) -> list[Any]:
    """Put, and wait until LMCache was told; the keys that it was told of."""
    told: list[Any] = []
    backend.batched_submit_put_task(keys, chunks, on_complete_callback=told.append)
    wait_for(lambda: len(told) == len(keys), "the chunks were put")
    return told


def test_chunks_go_through_the_pool_byte_for_byte(
    make: Callable[..., tuple[Rank, Any]], request: pytest.FixtureRequest
) -> None:
    first = 1000 if "remote" in request.node.name else 2000
    one, writer = make()
    two, reader = make()
    other, stranger = make(1)
    keys = [one.key(first + i) for i in range(4)]
    chunks = [one.chunk(first + i) for i in range(4)]
    assert not any(map(reader.contains, keys))
    assert saved(writer, keys, chunks) == keys
    for chunk in chunks:
        # LMCache's memory is read no more: it may be used again
        chunk.tensor.zero_()
    wait_for(lambda: reader.batched_contains(keys) == 4, "the chunks are known")
    unknown = one.key(first + 99)
    assert reader.batched_contains([*keys, unknown]) == 4
    had = reader.batched_get_blocking([*keys, unknown])
    assert had[4] is None
    for i in range(4):
        assert had[i].get_ref_count() == 1
        assert torch.equal(had[i].tensor, content(first + i))
    lone = reader.get_blocking(keys[2])
    assert torch.equal(lone.tensor, content(first + 2))
    assert reader.get_blocking(unknown) is None
    # another rank's chunks, and those of other tags, have other names
    assert stranger.batched_contains([other.key(first)]) == 0
    assert not reader.contains(one.key(first, {"lmcache.tag.user": "b"}))
    for each in (*had[:4], lone):
        each.ref_count_down()
    assert two.memory.get_allocator_backend() is two.memory


def test_an_engine_that_only_saves_finds_nothing(
    make: Callable[..., tuple[Rank, Any]], request: pytest.FixtureRequest
) -> None:
    first = 9000 if "remote" in request.node.name else 10_000
    one, backend = make()
    two, saver = make(mode="save")
    keys = [two.key(first)]
    saved(saver, keys, [two.chunk(first)])
    wait_for(lambda: backend.contains(keys[0]), "the chunk is known")
    assert not saver.contains(keys[0])
    assert saver.batched_get_blocking(keys) == [None]
    other, stranger = make(numerics="fp8 weights")
    assert not stranger.contains(other.key(first))
    assert one.metadata.worker_id == two.metadata.worker_id


def test_a_chunk_that_is_not_full_is_not_pooled(
    make: Callable[..., tuple[Rank, Any]], request: pytest.FixtureRequest
) -> None:
    first = 3000 if "remote" in request.node.name else 4000
    one, writer = make()
    keys = [one.key(first), one.key(first + 1)]
    full, part = one.chunk(first), one.chunk(first + 1, tokens=5)
    writer.batched_submit_put_task(keys, [full, part])
    wait_for(lambda: writer.batched_contains(keys) == 1, "the full one is known")
    assert not writer.contains(keys[1])
    assert writer.get_blocking(keys[1]) is None


def test_pins_and_async_questions(
    make: Callable[..., tuple[Rank, Any]], request: pytest.FixtureRequest
) -> None:
    first = 5000 if "remote" in request.node.name else 6000
    one, backend = make()
    keys = [one.key(first + i) for i in range(3)]
    saved(backend, keys, [one.chunk(first + i) for i in range(3)])
    wait_for(lambda: backend.batched_contains(keys) == 3, "the chunks are known")
    assert backend.contains(keys[0], pin=True)
    assert backend.pin(keys[0])
    assert backend.unpin(keys[0])
    assert not backend.remove(keys[0])

    async def ask() -> tuple[int, list[Any]]:
        wanted = [*keys, one.key(first + 9)]
        count = await backend.batched_async_contains("look", wanted, True)
        return count, await backend.batched_get_non_blocking("look", wanted)

    asked = asyncio.run_coroutine_threadsafe(ask(), one.loop)
    count, had = asked.result(20)
    assert count == 3
    assert all(
        torch.equal(each.tensor, content(first + i)) for i, each in enumerate(had)
    )
    assert len(had) == 3


def test_a_pool_that_is_gone_is_a_miss(
    tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    with Cluster(tmp_path, prefill=0, decode=0, settings=STORE) as mine:
        mine.wait_ready()
        rank = Rank(mine, loop)
        backend = rank.plugin()
        keys = [rank.key(1)]
        backend.batched_submit_put_task(keys, [rank.chunk(1)])
        wait_for(lambda: backend.contains(keys[0]), "the chunk is known")
    assert backend.batched_get_blocking(keys) == [None]
    backend.batched_submit_put_task([rank.key(2)], [rank.chunk(2)])
    backend.close()


def test_what_is_not_supported_is_said(
    cluster: Cluster, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtide.connect.lmcache_chunks import LmcacheChunks  # noqa: PLC0415
    from kvtide.runtime import ConfigError  # noqa: PLC0415

    rank = Rank(cluster, loop)
    rank.config.use_layerwise = True
    with pytest.raises(ConfigError, match="use_layerwise"):
        LmcacheChunks(rank.config, rank.metadata, rank.memory)
    rank.config.use_layerwise = False
    for weak in ("builtin", "sha256_cbor_64bit", "xxhash"):
        rank.config.pre_caching_hash_algorithm = weak
        with pytest.raises(ConfigError, match="set pre_caching_hash_algorithm to"):
            LmcacheChunks(rank.config, rank.metadata, rank.memory)
    rank.config.pre_caching_hash_algorithm = "sha256_cbor"
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "vllm.utils.hashing")
        with pytest.raises(ConfigError, match="beside vLLM"):
            LmcacheChunks(rank.config, rank.metadata, rank.memory)
    rank.config.extra_config["kvtide"] = {"nuts": 1}
    with pytest.raises(ConfigError, match="nuts"):
        LmcacheChunks(rank.config, rank.metadata, rank.memory)
