import subprocess
import sys

import msgspec
import pytest

from kvtide.engine.facts import ModelFacts
from kvtide.engine.settings import openmp_environment

FACTS = ModelFacts(
    name="demo",
    digest="ab" * 32,
    layers=30,
    kv_heads=3,
    head_dim=64,
    kv_dtype="float32",
    vocab_size=49152,
    max_tokens=8192,
    eos_token_ids=(2,),
    numerics="compute=float32",
)


def test_facts_travel_in_messages():
    sent = msgspec.msgpack.encode(FACTS)

    assert msgspec.msgpack.decode(sent, type=ModelFacts) == FACTS


def test_threads_wait_passively_in_a_started_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")

    started = openmp_environment(3)
    assert (started["KEPT"], started["OMP_WAIT_POLICY"]) == ("1", "PASSIVE")
    assert started["OMP_NUM_THREADS"] == "3"
    assert openmp_environment(None)["OMP_NUM_THREADS"] == "7"


def test_facts_sampling_and_demo_need_no_torch():
    modules = "facts, sampling, demo, errors, progress, settings, architecture"
    code = f"import sys; from kvtide.engine import {modules}; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # noqa: S603
