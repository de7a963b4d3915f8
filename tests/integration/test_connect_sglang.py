"""SGLang's HiCache backend on a real pool, under SGLang's own abstract class.

Runs where ``KVTIDE_TEST_SGLANG`` names a folder with SGLang's unpacked wheel. Its
packages' ``__init__`` files are passed by: they need a GPU's libraries, and what is
tested here (the abstract class, the factory, the fault injector) does not.
"""

import importlib
import os
import sys
import types
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.cluster import Cluster, wait_for

WHEEL = os.environ.get("KVTIDE_TEST_SGLANG", "")  # noqa: TID251 - a test's own
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not WHEEL, reason="KVTIDE_TEST_SGLANG names no wheel"),
]
PAGE = 16
STORE = {"store": {"dram_bytes": 32 << 20, "slab_bytes": 1 << 20}}


class HostPool:
    """SGLang's host memory, in its layout ``page_first``: K of all pages, then V."""

    def __init__(self, pages: int, layers: int = 3, heads: int = 2, head: int = 8):
        self.page_size, self.layout, self.dtype = PAGE, "page_first", torch.float32
        self.device_pool = types.SimpleNamespace(dtype=torch.float32)
        self.layer_num, self.head_num, self.head_dim = layers, heads, head
        self.kv_buffer = torch.zeros(2, pages * PAGE, layers, heads, head)

    def fill(self) -> None:
        self.kv_buffer.normal_(generator=torch.Generator().manual_seed(1))

    def page(self, index: int) -> torch.Tensor:
        return self.kv_buffer[:, index * PAGE : (index + 1) * PAGE]

    def get_page_buffer_meta(
        self, indices: torch.Tensor
    ) -> tuple[list[int], list[int]]:
        token = self.layer_num * self.head_num * self.head_dim * 4
        base, half = self.kv_buffer.data_ptr(), self.kv_buffer[0].nbytes
        starts = [base + int(i) * token for i in indices[::PAGE]]
        addresses = [at for start in starts for at in (start, start + half)]
        return addresses, [PAGE * token] * len(addresses)


def indices(first: int, pages: int) -> torch.Tensor:
    return torch.arange(first * PAGE, (first + pages) * PAGE)


@pytest.fixture(scope="module")
def sglang() -> Generator[Any]:
    names = (
        "sglang",
        "sglang.srt",
        "sglang.srt.mem_cache",
        "sglang.srt.mem_cache.storage",
    )
    for name in names:
        package = types.ModuleType(name)
        package.__path__ = [str(Path(WHEEL, *name.split(".")))]
        sys.modules[name] = package
    yield importlib.import_module("sglang.srt.mem_cache.storage.backend_factory")
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]


@pytest.fixture
def cluster(tmp_path: Path) -> Generator[Cluster]:
    with Cluster(tmp_path, prefill=0, decode=0, settings=STORE) as made:
        made.wait_ready()
        yield made


def backend(
    sglang: Any, cluster: Cluster, pool: HostPool, rank: int = 0, **more: str
) -> Any:
    storage = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    config = storage.HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=2,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="a model",
        extra_config={
            "backend_name": "kvtide",
            "module_path": "kvtide.connect.sglang",
            "class_name": "KvtideHiCache",
            "interface_v1": 1,
            "kvtide": {
                "nats": cluster.nats.url,
                "state_dir": str(cluster.state_dir),
                "shm_dir": str(cluster.shm_dir()),
                "model_digest": "d1",
                "save_timeout_s": 5.0,
                "load_timeout_s": 5.0,
                **more,
            },
        },
    )
    made = sglang.StorageBackendFactory.create_backend("dynamic", config, pool)
    made.register_mem_pool_host(pool)
    return made


def real(made: Any) -> Any:
    """The backend itself, without SGLang's fault injector around it."""
    return getattr(made, "_backend", made)


def joined(made: Any) -> Any:
    wait_for(lambda: real(made)._client.takes_blocks, "the backend found its store")
    return made


def test_pages_go_through_the_pool_byte_for_byte(sglang: Any, cluster: Cluster) -> None:
    source, target = HostPool(8), HostPool(8)
    source.fill()
    keys = [f"{i:064x}" for i in range(5)]
    one = joined(backend(sglang, cluster, source))
    two = joined(backend(sglang, cluster, target))
    other = joined(backend(sglang, cluster, HostPool(8), rank=1))
    assert one.batch_exists(keys) == 0
    assert one.batch_set_v1(keys, indices(0, 5)) == [True] * 5
    wait_for(lambda: two.batch_exists(keys) == 5, "the pages are known")
    one.close()
    assert two.batch_exists([*keys, "f" * 64]) == 5
    assert other.batch_exists(keys) == 0
    assert two.batch_get_v1([*keys, "f" * 64], indices(2, 6)) == [True] * 5 + [False]
    for i in range(5):
        assert torch.equal(target.page(2 + i), source.page(i))
    assert not target.page(7).any()
    assert not target.page(0).any()
    two.close()
    other.close()


def test_formats_of_one_size_and_engines_set_apart_share_nothing(
    sglang: Any, cluster: Cluster
) -> None:
    pools = [HostPool(8) for _ in range(5)]
    # both are bytes to the host's pool, as SGLang's `store_dtype` says
    kinds = [torch.float8_e4m3fn, torch.float8_e5m2, *[torch.float8_e4m3fn] * 3]
    for pool, kind in zip(pools, kinds, strict=True):
        pool.device_pool.dtype, pool.dtype = kind, torch.uint8
    ways: list[dict[str, str]] = [{}, {}, {}, {"numerics": "w4"}, {"mode": "save"}]
    made = [
        joined(backend(sglang, cluster, pool, 0, **way))
        for pool, way in zip(pools, ways, strict=True)
    ]
    writer, fp8, same, apart, saver = made
    keys = [f"{i:064x}" for i in range(3)]
    assert writer.batch_set_v1(keys, indices(0, 3)) == [True] * 3
    wait_for(lambda: same.batch_exists(keys) == 3, "the pages are known")
    for other in (fp8, apart, saver):
        assert other.batch_exists(keys) == 0
        assert other.batch_get_v1(keys, indices(0, 3)) == [False] * 3
    for each in made:
        each.close()


def test_sglangs_own_faults_lose_pages_and_change_none(
    sglang: Any, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.01")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    source, target = HostPool(64), HostPool(64)
    source.fill()
    one = joined(backend(sglang, cluster, source))
    two = joined(backend(sglang, cluster, target))
    assert type(one).__name__ == "HiCacheStorageFailureInjector"
    keys = [f"{i:064x}" for i in range(64)]
    saved = [one.batch_set_v1([key], indices(i, 1))[0] for i, key in enumerate(keys)]
    assert 0 < sum(saved) < 64
    known = [key for key, ok in zip(keys, saved, strict=True) if ok]
    wait_for(lambda: real(two).batch_exists(known) == len(known), "pages are known")
    had = [two.batch_get_v1([key], indices(i, 1))[0] for i, key in enumerate(keys)]
    assert 0 < sum(had) < sum(saved)
    for i, ok in enumerate(had):
        wanted = source.page(i) if ok else torch.zeros_like(source.page(i))
        assert torch.equal(target.page(i), wanted)
    real(one).close()
    real(two).close()
