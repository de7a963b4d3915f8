"""Stores as processes that begin at once: forked from one that has imported everything.

``python store_nursery.py`` reads a line of settings (JSON) and answers with the process
id of a store that runs with them, again and again until its input ends.
"""

import asyncio
import importlib
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tests.integration.cluster_process import run_role

ROOT = Path(__file__).parents[2]
END_LIMIT_S = 20


class Born:
    """A store that the nursery began."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    async def end(self, how: signal.Signals) -> None:
        """Send the signal, and wait until there is no such process."""
        os.kill(self.pid, how)
        async with asyncio.timeout(END_LIMIT_S):
            while self.lives():  # noqa: ASYNC110 - of another process's child
                await asyncio.sleep(0.005)

    def lives(self) -> bool:
        with suppress(ProcessLookupError):
            os.kill(self.pid, 0)
            return True
        return False


class Nursery:
    """One such program."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @asynccontextmanager
    async def store(self, settings: Mapping[str, object]) -> AsyncGenerator[Born]:
        """A store; killed when the context ends, if it is still there."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(settings).encode() + b"\n")
        async with asyncio.timeout(END_LIMIT_S):
            await stdin.drain()
            born = Born(int(await stdout.readline()))
        try:
            yield born
        finally:
            if born.lives():
                await born.end(signal.SIGKILL)


@asynccontextmanager
async def nursery() -> AsyncGenerator[Nursery]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__)),
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Nursery(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def main() -> None:
    for module in ("settings", "app"):
        importlib.import_module(f"kvtide.store.{module}")
    # the dead need nobody to ask after them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # a store of its own, whatever becomes of those who hold the other ends
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(2, 1)
            run_role("store", line)
            os._exit(0)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
