"""A whole system whose hosts move their blocks by an engine of others.

Runs where ``KVTIDE_TEST_ENGINE`` names one (``nixl``, ``mooncake``) that the roles can
import: ``ops/engines/test.sh`` sees to both.
"""

import os
import re
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from tests.chaos.model import chaos_model
from tests.e2e.oracle.reference import Oracle
from tests.e2e.system import Client
from tests.integration.cluster import Cluster

ENGINE = os.environ.get("KVTIDE_TEST_ENGINE", "")

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not ENGINE, reason="KVTIDE_TEST_ENGINE names no engine"),
]

TOKENS = 24
PROMPTS = [[500 + 40 * number + 3 * at for at in range(400)] for number in range(4)]


def moved(cluster: Cluster) -> Counter[str]:
    """Bytes that any role read or wrote, by path."""
    found = Counter[str]()
    for process in cluster.processes.values():
        for sample, value in process.metrics().items():
            path = re.search(r'_bytes_total{.*path="(\w+)".*side="client"', sample)
            if path:
                found[path[1]] += int(value)
    return found


def test_hosts_move_their_blocks_by_it(tmp_path: Path) -> None:
    model = chaos_model(tmp_path / "model")
    worker = {"model": str(model), "threads": 1, "transfer_engine": ENGINE}
    settings = {
        "prefill": worker,
        "decode": worker,
        "store": {"transfer_engine": ENGINE},
        "gateway": {"model": str(model)},
    }
    with Cluster(
        tmp_path / "c",
        hosts=2,
        conductors=1,
        gateways=1,
        prefill=1,
        decode=0,
        settings=settings,
    ) as cluster:
        # of two hosts the other one: what prefill computes goes between them
        cluster.add("decode", 1)
        cluster.wait_ready()
        oracle = Oracle(model)
        with closing(Client(cluster["gateway-0"].http_url)) as client:
            for _ in range(3):
                for prompt in PROMPTS:
                    answer = client.complete(prompt, TOKENS, ignore_eos=True)
                    assert oracle.check(prompt, answer.ids).right
        by_path = moved(cluster)
        assert by_path[ENGINE] > 1 << 20, by_path
        assert by_path["tcp"] == 0, by_path
