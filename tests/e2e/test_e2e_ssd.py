"""A store that is killed serves what its SSD has, and the answers stay right."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.oracle.prompts import text_tokens
from tests.e2e.oracle.reference import Oracle
from tests.e2e.system import System, wait_for

from kvtide.engine.demo import default_cache_dir, ensure_demo_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BLOCK = 64


def store_load(system: System) -> dict[str, Any]:
    """What the store last said of itself."""
    loads = [
        load
        for node in system.status()["nodes"]
        for load in node["beat"]["load"]
        if load["t"] == "store"
    ]
    return loads[0] if loads else {}


def test_a_prefix_comes_from_the_ssd_of_a_store_that_was_killed(tmp_path: Path) -> None:
    oracle = Oracle(ensure_demo_model(default_cache_dir()))
    with System(tmp_path / "state", "--dram", "64MiB", "--ssd", "1GiB") as system:
        prompt = text_tokens(system.tokenize, 4 * BLOCK + 5, 500)
        cold = system.complete(prompt, 8, ignore_eos=True)
        assert cold.cached_tokens == 0
        for number in range(5):
            other = text_tokens(system.tokenize, 6 * BLOCK + 1, 4000 + 700 * number)
            system.complete(other, 1)
        wait_for(lambda: store_load(system)["ssd_blocks"] >= 8, 60, "blocks on the SSD")
        (pid,) = system.pids("store")
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: system.pids("store") not in ([], [pid]), 60, "a new store")
        wait_for(
            lambda: (
                store_load(system).get("ssd_blocks", 0) >= 8
                and store_load(system)["used_slots"] == 0
            ),
            60,
            "its blocks are back",
        )
        wait_for(system.ready, 60, "every role is ready")
        warm = system.complete(prompt, 8, ignore_eos=True)
        assert oracle.check(prompt, list(warm.ids)).right
        assert warm.cached_tokens == 4 * BLOCK
