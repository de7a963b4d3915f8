"""What the router expects of SGLang, held against the released wheel's own source.

Runs where ``KVTIDE_TEST_SGLANG`` names a folder with SGLang's unpacked wheel. Its server
needs CUDA's libraries; what it publishes is encoded here by its own classes.
"""

import importlib
import os
import re
import sys
import types
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtide.connect.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    decode_batch,
)
from kvtide.router.asking import EngineKind
from kvtide.router.engine_load import read_metrics

WHEEL = os.environ.get("KVTIDE_TEST_SGLANG", "")  # noqa: TID251 - a test's own
pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not WHEEL, reason="KVTIDE_TEST_SGLANG names no wheel"),
]


@pytest.fixture
def events() -> Generator[Any]:
    """Its module of KV events; the packages around it are passed by."""
    for name in ("sglang", "sglang.srt", "sglang.srt.disaggregation"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(WHEEL, *name.split(".")))]
        sys.modules[name] = package
    # what the events themselves do not use
    unused = (
        ("sglang.srt.runtime_context", "get_parallel"),
        ("sglang.srt.utils.network", "NetworkAddress"),
    )
    for name, what in unused:
        sys.modules[name] = types.ModuleType(name)
        setattr(sys.modules[name], what, None)
    yield importlib.import_module("sglang.srt.disaggregation.kv_events")
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]


def test_its_kv_events_are_read_as_it_writes_them(events: Any) -> None:
    stored = events.BlockStored(
        block_hashes=[-7],
        parent_block_hash=None,
        token_ids=[1, 2],
        block_size=2,
        lora_id=None,
        medium="GPU",
        cache_salt="salt",
        session_id="session",
    )
    removed = events.BlockRemoved(block_hashes=[-7], medium="GPU")
    batch = events.KVEventBatch(
        ts=1.5, events=[stored, removed, events.AllBlocksCleared()], attn_dp_rank=0
    )
    read = decode_batch(msgspec.msgpack.Encoder().encode(batch))
    assert read.wall_s == 1.5
    assert read.events == (
        BlockStored(
            (-7,),
            None,
            (1, 2),
            2,
            medium="GPU",
            cache_salt="salt",
            session_id="session",
        ),
        BlockRemoved((-7,), medium="GPU"),
        AllBlocksCleared(),
    )


def test_its_metrics_have_the_names_that_are_read() -> None:
    source = Path(WHEEL, "sglang/srt/observability/metrics_collector.py").read_text()
    names = set(re.findall(r'name="(sglang:\w+)"', source))
    said = {
        "sglang:num_running_reqs": 3,
        "sglang:num_queue_reqs": 2,
        "sglang:token_usage": 0.25,
        "sglang:max_total_num_tokens": 1000,
    }
    assert set(said) <= names
    text = "\n".join(f"{name} {value}" for name, value in said.items())
    seen = read_metrics(EngineKind.SGLANG, text)
    assert (seen.running, seen.waiting) == (3, 2)
    assert (seen.kv_share, seen.capacity_tokens) == (0.25, 1000)
