"""A pool for each file, and what vLLM without a connector answers, for all tests with vLLM."""

from collections.abc import Generator
from pathlib import Path

import pytest
from tests.integration.cluster import Cluster
from tests.vllm.vllm_engine import options, vllm_engine
from tests.vllm.vllm_prompts import EVERY

from kvtide.engine.demo import default_cache_dir, ensure_demo_model

STORE = {"store": {"dram_bytes": 1 << 30, "slab_bytes": 64 << 20}}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def model() -> Path:
    return ensure_demo_model(default_cache_dir())


@pytest.fixture(scope="session")
def plain(folder: Path, model: Path) -> dict[str, list[int]]:
    """What vLLM without a connector answers, by prompt."""
    with vllm_engine(options(model, None), folder / "plain.log") as engine:
        found = {text: engine.generate([text]).tokens[0] for text in EVERY}
    assert len({tuple(tokens) for tokens in found.values()}) > 1
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster]:
    with Cluster(
        tmp_path_factory.mktemp("pool"), prefill=0, decode=0, settings=STORE
    ) as made:
        made.wait_ready()
        yield made
