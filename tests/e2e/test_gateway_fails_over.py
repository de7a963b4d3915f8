"""Workers die and hang under load: each stream pauses, then goes on with the same tokens."""

import functools
import itertools
import os
import random
import signal
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.fault_rounds import (
    ROLES,
    Saboteur,
    Streams,
    is_right,
    pauses,
    questions,
    told,
)
from tests.e2e.oracle.prompts import text_tokens
from tests.e2e.oracle.reference import Oracle
from tests.e2e.system import System, wait_for
from tests.e2e.trace_checks import check_trace, traced_answer
from tests.integration.otlp_receiver import OtlpReceiver

from kvtide.engine.demo import default_cache_dir, ensure_demo_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LONG = [pytest.mark.full, pytest.mark.timeout(2700)]
MOST_MEDIAN_S = 30.0
"""Ten times what it should take on a quiet machine."""


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as running:
        yield running


@pytest.fixture(scope="module")
def system(
    tmp_path_factory: pytest.TempPathFactory, collector: OtlpReceiver
) -> Iterator[System]:
    state = tmp_path_factory.mktemp("failover") / "state"
    with System(
        state,
        *("--prefill", "2", "--decode", "2", "--dram", "256MiB"),
        *("--spare", "--otlp", collector.url),
    ) as running:
        yield running


def test_one_trace_runs_through_all_processes(
    system: System, collector: OtlpReceiver
) -> None:
    prompt = text_tokens(system.tokenize, 200, 7)
    check_trace(traced_answer(system, collector, prompt))


def test_a_spare_takes_a_dead_workers_place(system: System) -> None:
    dead = system.processes()["decode-1"]
    os.kill(dead, signal.SIGKILL)
    wait_for(
        lambda: system.processes().get("decode-1", dead) != dead, 60, "another worker"
    )
    # a process keeps the environment that it was started with
    environment = Path(f"/proc/{system.processes()['decode-1']}/environ").read_bytes()
    assert b"_KVTIDE_NAME=spare" in environment.split(b"\0")
    wait_for(system.ready, 60, "every role is back")


@functools.cache
def oracle() -> Oracle:
    return Oracle(ensure_demo_model(default_cache_dir()))


def plan(rounds: int, kills: int) -> list[tuple[str, str]]:
    """``kills`` of the faults are kills, spread over both roles."""
    kinds = ["kill"] * kills + ["stop"] * (rounds - kills)
    return list(zip(itertools.cycle(ROLES), kinds, strict=False))


@pytest.mark.parametrize(
    ("rounds", "kills", "seed"),
    [(20, 4, 20), pytest.param(200, 100, 200, marks=LONG)],
    ids=["20", "200"],
)
def test_answers_are_those_of_an_undisturbed_run(
    system: System,
    collector: OtlpReceiver,
    rounds: int,
    kills: int,
    seed: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chance = random.Random(seed)  # noqa: S311 - to do it again
    asked = questions(system, 8)
    faults = plan(rounds, kills)
    chance.shuffle(faults)
    with Streams(system, asked, threads=4) as streams:
        wait_for(lambda: len(streams.all) > 4, 60, "streams under way")
        saboteur = Saboteur(system, chance)
        saboteur.run(faults)
    assert len(saboteur.faults) == rounds
    assert [stream.failure for stream in streams.all if stream.failure] == []
    found = pauses(saboteur.faults, streams.all, collector)
    wrong = [stream for stream in streams.all if not is_right(stream, oracle())]
    assert [(s.ids, s.question) for s in wrong] == [], seed
    with capsys.disabled():
        print(f"\n{rounds} faults, {len(streams.all)} streams\n{told(found)}")  # noqa: T201 - the figures are what people look for
    assert {one.fault.kind for one in found} == {"kill", "stop"}
    assert statistics.median(one.silence_s for one in found) < MOST_MEDIAN_S
    wait_for(system.ready, 60, "every role is back")
    workers = [f"{role}-{number}" for role in ROLES for number in range(2)]
    system.wait_idle("store-0", *workers, "conductor-0", "gateway-0")
