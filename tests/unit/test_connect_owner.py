"""An engine's process ends when its owner is killed, and not before."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from kvtide.connect.owner import end_with

LIMIT_S = 30.0
ENGINE = """
import sys, time
from kvtide.connect.owner import end_with
end_with(int(sys.argv[1]))
print("tied", flush=True)
time.sleep(600)
"""
OWNER = f"""
import os, subprocess, sys
engine = subprocess.Popen([sys.executable, "-c", {ENGINE!r}, str(os.getpid())])
print(engine.pid, flush=True)
engine.wait()
"""


def test_it_ends_when_its_owner_is_killed() -> None:
    with subprocess.Popen(  # noqa: S603 - our own code
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        engine = int(owner.stdout.readline())
        try:
            assert owner.stdout.readline() == "tied\n"
            assert Path(f"/proc/{engine}").exists()
            owner.kill()
            # the pipe is the engine's too: it is at its end when both have ended
            assert owner.communicate(timeout=LIMIT_S)[0] == ""
        finally:
            owner.kill()


def test_one_whose_owner_has_ended_already_ends_at_once() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    ended = subprocess.run(  # noqa: S603 - our own code
        [sys.executable, "-c", ENGINE, str(gone.pid)], timeout=LIMIT_S, check=False
    )
    assert ended.returncode == -signal.SIGKILL


def test_an_engine_in_its_owners_own_process_is_not_killed() -> None:
    end_with(os.getpid())
