"""SIGTERM of each role under streams: not ready first, every stream whole, exit 0."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

import httpx
import pytest
from tests.e2e.system import Client, wait_for
from tests.integration.cluster import Cluster, RoleProcess

from kvtide.engine.demo import default_cache_dir, ensure_demo_model

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

TOKENS = 120
PROMPTS = [[500 + 40 * number + at for at in range(90)] for number in range(3)]
END_LIMIT_S = 60.0
SLOW_TO_END = ("decode", "gateway")
"""Roles that streams keep up after they were told to end."""


class Streaming:
    """A few streams at once; ``ids`` are the tokens so far."""

    def __init__(self, client: Client) -> None:
        self.ids: list[list[int]] = [[] for _ in PROMPTS]
        self.failures: list[Exception] = []
        self._client = client
        self._threads = [Thread(target=self._read, args=(at,)) for at in range(3)]
        for thread in self._threads:
            thread.start()

    def _read(self, at: int) -> None:
        try:
            for event in self._client.stream(PROMPTS[at], TOKENS, ignore_eos=True):
                for choice in event["choices"]:
                    self.ids[at] += choice.get("token_ids") or ()
        except Exception as failure:  # noqa: BLE001 - raised in the test's own thread
            self.failures.append(failure)

    def are_under_way(self) -> bool:
        return all(len(ids) >= 4 for ids in self.ids) or bool(self.failures)

    def whole(self) -> Sequence[Sequence[int]]:
        for thread in self._threads:
            thread.join(END_LIMIT_S)
        assert not any(thread.is_alive() for thread in self._threads), "a stream hangs"
        assert self.failures == []
        return self.ids


def says_that_it_ends(process: RoleProcess) -> bool:
    """Its /readyz is a 503 now; one that has ended has said nothing."""
    return httpx.get(f"{process.http_url}/readyz", timeout=5).status_code == 503


def test_each_role_ends_without_harm(tmp_path: Path) -> None:
    model = str(ensure_demo_model(default_cache_dir()))
    settings = {role: {"model": model, "threads": 1} for role in ("prefill", "decode")}
    with Cluster(
        tmp_path / "c",
        prefill=2,
        decode=2,
        conductors=2,
        gateways=1,
        settings={**settings, "gateway": {"model": model}},
    ) as cluster:
        cluster.wait_ready()
        client = Client(cluster["gateway-0"].http_url)
        undisturbed = [
            list(client.complete(prompt, TOKENS, ignore_eos=True).ids)
            for prompt in PROMPTS
        ]
        for name in ("decode-0", "prefill-0", "conductor-0", "gateway-0"):
            streaming = Streaming(client)
            wait_for(streaming.are_under_way, END_LIMIT_S, "streams under way", 0.01)
            process = cluster[name]
            os.kill(process.pid, signal.SIGTERM)
            if process.role in SLOW_TO_END:
                wait_for(
                    lambda p=process: says_that_it_ends(p), 10, f"{name} says so", 0.01
                )
            assert streaming.whole() == undisturbed, name
            assert process.wait(END_LIMIT_S) == 0, cluster.tail(process)
        client.close()
        assert cluster["store-0"].alive
        os.kill(cluster["store-0"].pid, signal.SIGTERM)
        assert cluster["store-0"].wait(END_LIMIT_S) == 0
