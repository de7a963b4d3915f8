"""``kvtide up`` from the lock to the last process: prepare, run, put away."""

import asyncio
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from kvtide.cli.settings import UpSettings
from kvtide.cli.supervisor.addresses import require_free
from kvtide.cli.supervisor.children import ProcessSpec
from kvtide.cli.supervisor.ledger import Ledger
from kvtide.cli.supervisor.leftovers import (
    make_own_shm_dir,
    own_shm_dir,
    remove_own_shm_dir,
    sweep_given_shm_dir,
)
from kvtide.cli.supervisor.obituaries import Obituaries
from kvtide.cli.supervisor.screen import PlainScreen
from kvtide.cli.supervisor.spare import SparePlan
from kvtide.cli.supervisor.supervise import Supervisor, WhenReady
from kvtide.runtime import Clock, KvtideError

MakeSpecs = Callable[[UpSettings, Path], Sequence[ProcessSpec]]
"""From the settings and the shared memory folder to what is to run."""


class NotReadyError(KvtideError):
    """The system did not get ready in time."""


@dataclass(frozen=True, slots=True)
class Session:
    """One run of ``kvtide up``.

    ``make_specs`` may take long (it fetches the model): it is called when the port is
    known to be free and the lock is held, before anything starts. ``when_ready`` gets
    the supervisor once every process is ready; when it raises, all ends.
    """

    settings: UpSettings
    screen: PlainScreen
    clock: Clock
    make_specs: MakeSpecs
    when_ready: Callable[[Supervisor], WhenReady]
    watch: Callable[[Supervisor], WhenReady] | None = None
    """Runs from the start to the end beside the processes, for the status line."""
    spare: Callable[[Sequence[ProcessSpec]], SparePlan | None] = lambda _specs: None
    """Of what is to run: whose place a process in reserve can take, and how."""
    obituaries: Obituaries | None = None
    """Tells the others of each process that ended."""

    def run(self) -> int:
        """Start everything, stay, and leave nothing; the exit code.

        Raises:
            ConfigError: the state folder is in use, the port is taken, and so on.
            KvtideError: the model never answered.
        """
        settings = self.settings
        with Ledger(settings.state_dir) as ledger, self._shared_memory(ledger) as shm:
            require_free(settings.host, settings.port)
            specs = self.make_specs(settings, shm)
            supervisor = Supervisor(
                specs,
                ledger=ledger,
                log_folder=settings.state_dir / "logs",
                screen=self.screen,
                clock=self.clock,
                spare=self.spare(specs),
                on_exit=self.obituaries.ended if self.obituaries else _nobody_to_tell,
            )
            with self.screen:
                return asyncio.run(self._supervise(supervisor))

    def _shared_memory(self, ledger: Ledger) -> AbstractContextManager[Path]:
        """Sweep what an earlier run left, and give this one its folder."""
        swept = ledger.sweep(pause=threading.Event().wait)
        given = self.settings.shm_dir
        if given is not None:
            files = sweep_given_shm_dir(given)
            folder: AbstractContextManager[Path] = nullcontext(given)
        else:
            own = own_shm_dir(self.settings.state_dir)
            files = remove_own_shm_dir(own)
            folder = _OwnFolder(own)
        if swept:
            names = ", ".join(swept)
            self.screen.say(f"ended what an earlier run had left running: {names}")
        if files:
            self.screen.say(f"removed {files} shared memory files of an earlier run")
        return folder

    async def _supervise(self, supervisor: Supervisor) -> int:
        loop = asyncio.get_running_loop()

        def asked() -> None:
            if not supervisor.stopping:
                self.screen.say("stopping (once more: at once)")
            supervisor.stop()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, asked)
        when_ready = self.when_ready(supervisor)
        answered = asyncio.Event()

        async def announce() -> None:
            await when_ready()
            answered.set()

        async def limit() -> None:
            await self.clock.sleep(self.settings.ready_timeout_s)
            if not answered.is_set():
                message = (
                    f"not ready after {self.settings.ready_timeout_s:g} s; see the logs "
                    f"in {self.settings.state_dir / 'logs'}"
                )
                raise NotReadyError(message)

        beside: list[WhenReady] = [limit]
        if self.watch is not None:
            beside.append(self.watch(supervisor))
        if self.obituaries is not None:
            beside.append(self.obituaries.send)
        return await supervisor.run(announce, beside=beside)


def _nobody_to_tell(_name: str) -> None:
    return


class _OwnFolder(AbstractContextManager[Path]):
    """The folder in shared memory of this run, there for as long as it lasts."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Path:
        make_own_shm_dir(self._path)
        return self._path

    def __exit__(self, *_exc: object) -> None:
        remove_own_shm_dir(self._path)
