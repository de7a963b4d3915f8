"""One process that does prefill and decode, as ``kvtide up --worker`` starts it."""

from pathlib import Path

import httpx
import pytest
from tests.e2e.system import System, alive

PROMPT = " ".join(f"{n} times {n} is {n * n}." for n in range(1, 30))


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_combined_worker_serves_caches_and_leaves_nothing(tmp_path: Path) -> None:
    args = ("--prefill", "0", "--decode", "0", "--worker", "1")
    with System(tmp_path / "state", *args) as system:
        cold = system.complete(PROMPT, 8)
        warm = system.complete(PROMPT, 8)
        assert cold.ids == warm.ids
        assert cold.cached_tokens == 0
        assert warm.cached_tokens > 0
        nodes = {
            node["beat"]["node"]["node"]: node["beat"]
            for node in system.status()["nodes"]
        }
        assert nodes["worker-0"]["roles"] == ["prefill", "decode"]
        metrics = httpx.get(f"{nodes['worker-0']['http']}/metrics").text
        assert 'kvtide_build_info{node="worker-0"' in metrics
        assert httpx.get(f"{nodes['worker-0']['http']}/readyz").status_code == 200
        system.wait_idle()
        pids = list(system.processes().values())
        shm = system.shm_dir
        assert shm.is_dir()
    assert not any(alive(pid) for pid in pids)
    assert not shm.exists()
