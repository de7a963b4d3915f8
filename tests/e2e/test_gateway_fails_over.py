"""The only worker of a kind is killed in mid-stream: a pause, then the same tokens."""

import itertools
import os
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from tests.e2e.oracle.prompts import text_tokens
from tests.e2e.system import System, wait_for
from tests.e2e.trace_checks import check_trace, traced_answer
from tests.integration.otlp_receiver import OtlpReceiver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG = [pytest.mark.full, pytest.mark.timeout(900)]
TOKENS = 64
KILL_AFTER = 12
BACK_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as running:
        yield running


@pytest.fixture(scope="module")
def system(
    tmp_path_factory: pytest.TempPathFactory, collector: OtlpReceiver
) -> Iterator[System]:
    state = tmp_path_factory.mktemp("failover") / "state"
    with System(state, "--dram", "256MiB", "--otlp", collector.url) as running:
        yield running


def test_one_trace_runs_through_all_processes(
    system: System, collector: OtlpReceiver
) -> None:
    prompt = text_tokens(system.tokenize, 200, 7)
    check_trace(traced_answer(system, collector, prompt))


@dataclass
class Streamed:
    """A stream's tokens, each with the time at which it came."""

    ids: list[int] = field(default_factory=list[int])
    times_s: list[float] = field(default_factory=list[float])
    failure: Exception | None = None

    def read(self, system: System, prompt: Sequence[int]) -> None:
        try:
            for event in system.stream(prompt, TOKENS, ignore_eos=True):
                for choice in event["choices"]:
                    got = choice.get("token_ids") or ()
                    self.ids += got
                    self.times_s += [time.monotonic()] * len(got)
        except Exception as failure:  # noqa: BLE001 - raised in the test's own thread
            self.failure = failure

    def silence_s(self, moment_s: float) -> float:
        """The longest time without a token from then on."""
        times_s = [moment_s, *(t for t in self.times_s if t > moment_s)]
        return max(after - before for before, after in itertools.pairwise(times_s))


@pytest.mark.parametrize(
    ("role", "turns"),
    [
        ("decode", 1),
        ("prefill", 1),
        pytest.param("decode", 10, marks=LONG),
        pytest.param("prefill", 10, marks=LONG),
    ],
)
def test_a_stream_outlives_the_only_worker(
    system: System, role: str, turns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    silences_s: list[float] = []
    for turn in range(turns):
        prompt = text_tokens(system.tokenize, 60, 300 + 40 * turn)
        stream = Streamed()
        reader = threading.Thread(target=stream.read, args=(system, prompt))
        reader.start()
        wait_for(
            lambda s=stream: len(s.ids) >= KILL_AFTER, 60, "a running stream", 0.01
        )
        name, pid = next(
            (n, pid) for n, pid in system.processes().items() if n.startswith(role)
        )
        killed_s = time.monotonic()
        had = len(stream.ids)
        os.kill(pid, signal.SIGKILL)
        reader.join(BACK_LIMIT_S)
        assert not reader.is_alive(), "the stream hangs"
        assert stream.failure is None
        assert had < TOKENS, "it was killed after the end"
        silences_s.append(stream.silence_s(killed_s))
        wait_for(
            lambda name=name, pid=pid: system.processes().get(name, pid) != pid,
            BACK_LIMIT_S,
            f"{name} is started again",
        )
        wait_for(system.ready, BACK_LIMIT_S, "every role is back")
        undisturbed = system.complete(prompt, TOKENS, ignore_eos=True)
        assert tuple(stream.ids) == undisturbed.ids
    with capsys.disabled():
        median_s = statistics.median(silences_s)
        print(  # noqa: T201 - the figure is what people look for
            f"\n{role} killed: a silence of {median_s:.2f} s at the median, "
            f"of {[round(s, 2) for s in silences_s]}"
        )
