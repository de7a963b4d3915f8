"""Processes that are made to do nothing."""

import os
import signal
import time
from pathlib import Path

LIMIT_S = 30.0


def halt(pid: int) -> None:
    """Stop the process, and wait until it is: its threads may run on for a while.

    The signal takes effect when the one thread that it is given to is scheduled; on a busy
    machine another one has answered a question by then.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline_s = time.monotonic() + LIMIT_S  # noqa: TID251 - a real process
    while not _is_stopped(pid):
        if time.monotonic() > deadline_s:  # noqa: TID251 - a real process
            raise TimeoutError(f"process {pid} does not stop")
        time.sleep(0.001)


def _is_stopped(pid: int) -> bool:
    try:
        states = {
            stat.read_text().rpartition(")")[2].split()[0]
            for stat in Path(f"/proc/{pid}/task").glob("*/stat")
        }
    except (FileNotFoundError, ProcessLookupError):  # a thread has just ended
        return False
    return states <= {"T", "Z", "X"}
