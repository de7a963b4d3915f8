"""The supervisor with real processes: nothing is left, whatever ends it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtide.cli.supervisor.addresses import free_ports
from kvtide.cli.supervisor.leftovers import own_shm_dir

HARNESS = Path(__file__).with_name("cli_stand_ins.py")
DEADLINE_S = 40.0


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    deadline_s = time.perf_counter() + DEADLINE_S
    while not condition():
        if time.perf_counter() > deadline_s:
            pytest.fail(f"not within {DEADLINE_S} s: {what}")
        time.sleep(0.05)


@dataclass
class Up:
    state: Path
    port: int
    process: subprocess.Popen[str]
    output: Path

    def said(self) -> str:
        return self.output.read_text()

    def wait_said(self, text: str, times: int = 1) -> None:
        wait_for(f"{text!r} in {self.output}", lambda: self.said().count(text) >= times)

    def pids(self, name: str) -> list[int]:
        """The process and its child, of the newest start of a stand-in."""
        log = (self.state / "logs" / f"{name}.log").read_text()
        lines = [line for line in log.splitlines() if line.startswith("pids ")]
        return [int(word) for word in lines[-1].split()[1:]]

    def shm(self) -> Path:
        return own_shm_dir(self.state)


Starter = Callable[..., Up]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    started: list[Up] = []

    def starter(*kinds: str, port: int | None = None) -> Up:
        output = tmp_path / f"up-{len(started)}.txt"
        port = port or free_ports(1)[0]
        with output.open("w") as file:
            process = subprocess.Popen(  # noqa: S603 - our own harness
                [
                    sys.executable,
                    str(HARNESS),
                    str(tmp_path / "state"),
                    str(port),
                    *kinds,
                ],
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )
        up = Up(tmp_path / "state", port, process, output)
        started.append(up)
        return up

    yield starter
    for up in started:
        if up.process.poll() is None:
            up.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                up.process.wait(20)
        up.process.kill()
        up.process.wait()


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[0]
    except OSError:
        return True
    return state in (b"Z", b"X")


def all_gone(pids: list[int]) -> bool:
    return all(is_gone(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_everything_in_order_and_leaves_nothing(
    start: Starter, number: signal.Signals
) -> None:
    up = start("bus=steady", "store=steady", "gateway=steady")
    up.wait_said("ALL READY")
    pids = [pid for name in ("bus", "store", "gateway") for pid in up.pids(name)]
    assert len(pids) == 6
    assert not any(is_gone(pid) for pid in pids)
    assert len(list(up.shm().iterdir())) == 3
    up.process.send_signal(number)
    assert up.process.wait(DEADLINE_S) == 0
    wait_for("every process is gone", lambda: all_gone(pids))
    assert not up.shm().exists()
    assert {path.name for path in up.state.iterdir()} == {"logs", "run"}


@pytest.mark.timeout(120)
def test_a_role_that_does_not_end_is_killed(start: Starter) -> None:
    up = start("bus=steady", "store=stubborn")
    up.wait_said("ALL READY")
    pids = up.pids("bus") + up.pids("store")
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(DEADLINE_S) == 0
    assert "store did not end within" in up.said()
    wait_for("every process is gone", lambda: all_gone(pids))


def test_asked_twice_it_ends_at_once(start: Starter) -> None:
    up = start("bus=stubborn", "store=stubborn")
    up.wait_said("ALL READY")
    up.process.send_signal(signal.SIGINT)
    up.wait_said("stopping")
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(5) == 0
    wait_for("gone", lambda: all_gone(up.pids("bus") + up.pids("store")))


def test_a_killed_supervisor_leaves_no_process_and_the_next_start_sweeps(
    start: Starter,
) -> None:
    up = start("bus=steady", "store=stubborn")
    up.wait_said("ALL READY")
    roles = [up.pids("bus")[0], up.pids("store")[0]]
    children = [up.pids("bus")[1], up.pids("store")[1]]
    up.process.kill()
    up.process.wait()
    wait_for("the leash ended the roles", lambda: all_gone(roles))
    assert len(list(up.shm().iterdir())) == 2
    # children that the roles had started outlive them, until the next start
    again = start("bus=steady", "store=steady", port=up.port)
    again.wait_said("ALL READY")
    wait_for("their children are swept", lambda: all_gone(children))
    assert "had left running: bus, store" in again.said()
    assert "removed 2 shared memory files" in again.said()
    assert len(list(again.shm().iterdir())) == 2
    again.process.send_signal(signal.SIGTERM)
    assert again.process.wait(DEADLINE_S) == 0
    assert not again.shm().exists()


def test_a_role_that_is_killed_is_started_again_and_said_so(start: Starter) -> None:
    up = start("bus=steady", "store=steady")
    up.wait_said("ALL READY")
    first, child = up.pids("store")
    os.kill(first, signal.SIGKILL)
    up.wait_said("store was killed by signal 9; starting it again")
    up.wait_said("store is ready again")
    assert is_gone(child), "what it had started is ended with it"
    second = up.pids("store")[0]
    assert second != first
    os.kill(second, signal.SIGKILL)
    up.wait_said("starting it again in 0.5 s")
    up.wait_said("store is ready again", times=2)


def test_a_taken_port_is_named_before_anything_starts(start: Starter) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        up = start("bus=steady", port=port)
        assert up.process.wait(DEADLINE_S) == 2
    assert f"port {port} on 127.0.0.1 is taken" in up.said()
    assert not (up.state / "logs").exists()
    assert not up.shm().exists()


def test_a_second_one_on_the_same_state_folder_is_refused(start: Starter) -> None:
    up = start("bus=steady")
    up.wait_said("ALL READY")
    second = start("bus=steady")
    assert second.process.wait(DEADLINE_S) == 2
    assert f"another kvtide (process {up.process.pid}) uses the state" in second.said()
    assert not any(is_gone(pid) for pid in up.pids("bus"))
    assert up.shm().exists()


def test_refused_settings_end_everything_with_the_reason(start: Starter) -> None:
    up = start("bus=steady", "store=refuses")
    assert up.process.wait(DEADLINE_S) == 2
    assert "store refuses its settings" in up.said()
    assert "threads: must be greater than 0" in up.said()
    wait_for("gone", lambda: all_gone(up.pids("bus")))


@pytest.mark.timeout(120)
def test_a_role_that_never_gets_ready_is_given_up(start: Starter) -> None:
    up = start("bus=steady", "store=fails")
    assert up.process.wait(DEADLINE_S) == 1
    assert "5 times without getting ready; giving up" in up.said()
    assert "boom" in up.said()
