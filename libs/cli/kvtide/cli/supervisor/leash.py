"""Runs a command that the kernel kills when its starter dies, however it dies.

``python -I -S leash.py STARTER_PID COMMAND…``: the process keeps its id and becomes the
command. A script of its own instead of code between fork and exec, which is not safe
in a process with threads. Uses nothing but the standard library.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_USAGE = 64
_NOT_FOUND = 127


def main(arguments: list[str]) -> int:
    """Become the command; returns only when that can't be done."""
    if len(arguments) < 2:  # noqa: PLR2004 - the starter and at least a program
        return _USAGE
    starter = int(arguments[0])
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.stderr.write(f"prctl: {os.strerror(ctypes.get_errno())}\n")
        return _NOT_FOUND
    if os.getppid() != starter:
        return 0  # it died before the leash was on
    try:
        os.execvp(arguments[1], arguments[1:])  # noqa: S606 - that is the purpose
    except OSError as error:
        sys.stderr.write(f"can't run {arguments[1]}: {error.strerror}\n")
        return _NOT_FOUND


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
