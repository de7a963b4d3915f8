"""Each role is killed once under load: nothing hangs, the rest serves on, all is freed."""

import itertools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.e2e.asking import Asking
from tests.e2e.oracle.prompts import text_tokens
from tests.e2e.oracle.reference import Oracle
from tests.e2e.system import RequestError, System, alive, wait_for
from typing_extensions import override

from kvtide.engine.demo import default_cache_dir, ensure_demo_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REQUEST_LIMIT_S = 90.0
"""Far above what an answer takes here: a request that takes longer hangs."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    state = tmp_path_factory.mktemp("kills") / "state"
    with System(
        state,
        *("--prefill", "2", "--decode", "2", "--conductors", "2"),
        *("--dram", "512MiB"),
    ) as running:
        yield running


class Load(Asking):
    """Requests in a few threads until told to stop; a ledger of every one."""

    def __init__(self, system: System, threads: int) -> None:
        super().__init__(threads, REQUEST_LIMIT_S)
        self.answers: list[tuple[Sequence[int], tuple[int, ...]]] = []
        self.errors: list[tuple[float, RequestError]] = []
        self.slowest_s = 0.0
        self._system = system
        self._numbers = itertools.count()
        self._shared = text_tokens(system.tokenize, 130, 5)
        self._texts = [
            text_tokens(system.tokenize, 20 + i % 70, 1000 + 40 * i) for i in range(80)
        ]

    @override
    def ask(self) -> bool:
        number = next(self._numbers)
        prompt = self._shared + self._texts[number % len(self._texts)]
        start_s = time.monotonic()
        try:
            if number % 2:
                ids = self._system.stream_ids(prompt, 24, ignore_eos=True)
            else:
                ids = self._system.complete(prompt, 24, ignore_eos=True).ids
        except RequestError as error:
            with self.lock:
                self.errors.append((time.monotonic(), error))
            self.stop.wait(0.3)
        else:
            with self.lock:
                self.answers.append((prompt, ids))
        with self.lock:
            self.slowest_s = max(self.slowest_s, time.monotonic() - start_s)
        return True

    def answered_more(self, more: int) -> None:
        """Wait for ``more`` right answers from now on."""
        before = len(self.answers)
        wait_for(
            lambda: len(self.answers) >= before + more,
            REQUEST_LIMIT_S,
            f"{more} more answers after {before}; errors {self.errors[-3:]}",
        )


# workers are killed and stopped twenty times in test_gateway_fails_over.py
@pytest.mark.parametrize(
    "roles",
    [
        ("conductor", "store", "gateway"),
        pytest.param(("decode", "prefill", "store"), marks=pytest.mark.full),
    ],
    ids="-".join,
)
def test_each_role_is_killed_under_load(system: System, roles: tuple[str, ...]) -> None:
    system.complete(text_tokens(system.tokenize, 40), 4)
    shm_before = arenas(system)
    doors_closed: tuple[float, float] = (0.0, 0.0)
    with Load(system, threads=4) as load:
        load.answered_more(4)
        for role in roles:
            name, pid = next(
                (name, pid)
                for name, pid in system.processes().items()
                if name.startswith(role)
            )
            killed_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            wait_for(
                lambda name=name, pid=pid: system.processes().get(name, pid) != pid,
                60,
                f"{name} is started again",
            )
            load.answered_more(6)
            if role == "gateway":
                doors_closed = (killed_s, time.monotonic())
    assert load.slowest_s < REQUEST_LIMIT_S
    # while its gateway lives, a request that fails is told so: only the gateway's own
    # death may break a connection or end a stream without a word
    for at_s, error in load.errors:
        silent = error.status == 0
        assert not silent or doors_closed[0] <= at_s <= doors_closed[1], error
        assert error.status in (0, 500, 502, 503), error
    oracle = Oracle(ensure_demo_model(default_cache_dir()))
    for prompt, ids in load.answers:
        assert len(ids) == 24
        assert oracle.check(prompt, ids).right, (prompt, ids)
    wait_for(system.ready, 60, "every role is back")
    system.wait_idle(
        *("store-0", "prefill-0", "prefill-1", "decode-0", "decode-1"),
        *("conductor-0", "conductor-1", "gateway-0"),
    )
    assert len(arenas(system)) == len(shm_before)


def arenas(system: System) -> list[Path]:
    """Files in the system's shared memory folder."""
    return sorted(path for path in system.shm_dir.iterdir() if path.is_file())


@pytest.mark.full
def test_the_supervisor_is_killed_and_the_next_start_sweeps(tmp_path: Path) -> None:
    state = tmp_path / "state"
    first = System(state)
    first.start()
    pids = first.processes()
    first.kill_supervisor()
    first.close()
    wait_for(
        lambda: not any(alive(pid) for pid in pids.values()), 20, "its children end"
    )
    with System(state) as second:
        assert second.complete("Once upon a time", 4).completion_tokens == 4
    assert not second.shm_dir.exists()
