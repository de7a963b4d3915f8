"""The shell around the machine: processes, probes, signals and the screen."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from kvtide.cli.supervisor.children import (
    ProcessSpec,
    kill_group,
    start_child,
    terminate,
)
from kvtide.cli.supervisor.ledger import Ledger
from kvtide.cli.supervisor.machine import (
    Command,
    Event,
    Exited,
    Finish,
    Kill,
    Member,
    Phase,
    Probed,
    Say,
    Spawn,
    Spawned,
    StopAsked,
    Supervision,
    Terminate,
    Tick,
)
from kvtide.cli.supervisor.readiness import ask
from kvtide.cli.supervisor.role_logs import RoleLog
from kvtide.cli.supervisor.screen import Row, Screen
from kvtide.cli.supervisor.spare import Spare, SparePlan
from kvtide.runtime import Clock, TaskScope

TICK_S = 0.2
PROBE_STARTING_S = 0.2
PROBE_READY_S = 2.0
LOGS_EVERY_S = 1.0
_SPAWN_FAILED = 71
_QUEUE = 1024

WhenReady = Callable[[], Awaitable[None]]
"""Work that the supervisor runs beside its processes."""


class Supervisor:
    """Keeps the processes of ``specs`` running until told to stop.

    ``run`` returns only when every process that it started is gone.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        ledger: Ledger,
        log_folder: Path,
        screen: Screen,
        clock: Clock,
        grace_s: float = 8.0,
        spare: SparePlan | None = None,
        on_exit: Callable[[str], None] = lambda _name: None,
    ) -> None:
        """The ledger's lock is held by the caller.

        ``on_exit`` hears the name of each process that ended, before it is started again.
        """
        self._on_exit = on_exit
        self._spare = (
            Spare(spare, ledger=ledger, log_folder=log_folder, clock=clock)
            if spare is not None
            else None
        )
        self._specs = {spec.name: spec for spec in specs}
        self._logs = {spec.name: RoleLog(log_folder, spec.name) for spec in specs}
        self._machine = Supervision(
            tuple(Member(s.name, s.start_stage, s.stop_stage) for s in specs), grace_s
        )
        self._ledger = ledger
        self._screen = screen
        self._clock = clock
        self._events: asyncio.Queue[Event] = asyncio.Queue(_QUEUE)
        # what must not be lost, nor wait in a full queue, comes before the queue
        self._pending: deque[Event] = deque()
        self._code: int | None = None
        self._logs_due_s = 0.0
        self.cluster = ""
        """A line on load and cache, shown below the table; whoever knows sets it."""

    @property
    def ready(self) -> bool:
        """Whether every process is ready now."""
        return self._machine.all_ready

    def stop(self) -> None:
        """End everything in order; called again, at once. For signal handlers."""
        self._pending.append(StopAsked())
        with contextlib.suppress(asyncio.QueueFull):
            self._events.put_nowait(Tick())  # wakes the loop

    def say(self, text: str) -> None:
        """A line for the person, unless the end was asked for."""
        if not self._machine.stopping:
            self._screen.say(text)

    @property
    def stopping(self) -> bool:
        """Whether the end was asked for, or has become unavoidable."""
        return self._machine.stopping

    async def run(
        self, when_ready: WhenReady, *, beside: Sequence[WhenReady] = ()
    ) -> int:
        """Start all, keep them, and end them after ``stop``; the exit code.

        ``when_ready`` runs once all are ready, ``beside`` from the start to the end. A
        failure of either ends all, too, and is raised.
        """
        failure: list[BaseException] = []

        def failed(error: BaseException) -> None:
            failure.append(error)
            self.stop()

        async with TaskScope(on_error=failed) as tasks:
            tasks.spawn(self._tick(), name="tick")
            for number, work in enumerate(beside):
                tasks.spawn(_awaited(work()), name=f"beside {number}")
            for name in self._specs:
                tasks.spawn(self._probe(name), name=f"probe {name}")
            announced = False
            while self._code is None:
                event = await self._next_event()
                for command in self._machine.handle(event, self._clock.monotonic()):
                    await self._act(command, tasks)
                if self._machine.all_ready and not announced:
                    announced = True
                    tasks.spawn(_awaited(when_ready()), name="when ready")
                await self._keep_spare()
                self._show()
            if self._spare is not None:
                await self._spare.end()
        if failure:
            raise failure[0]
        return self._code

    async def _keep_spare(self) -> None:
        """A spare only while all is well: who starts needs the processor more."""
        spare = self._spare
        if spare is None:
            return
        if self._machine.stopping:
            await spare.end()
        elif self._machine.all_ready and not spare.waits():
            await spare.start()

    async def _act(self, command: Command, tasks: TaskScope) -> None:
        if isinstance(command, Spawn):
            await self._spawn(command.name, tasks)
        elif isinstance(command, Terminate):
            if (pid := self._machine.lives[command.name].pid) is not None:
                terminate(pid)
        elif isinstance(command, Kill):
            if (pid := self._machine.lives[command.name].pid) is not None:
                kill_group(pid)
        elif isinstance(command, Say):
            self._screen.say(command.text, bad=command.bad)
            if command.bad and command.name:
                log = self._logs[command.name]
                self._screen.quote([*log.tail(), f"({log.path})"])
        else:
            self._finish(command)

    def _finish(self, command: Finish) -> None:
        self._code = command.code

    async def _spawn(self, name: str, tasks: TaskScope) -> None:
        spare, log = self._spare, self._logs[name]
        try:
            child = await spare.take(name, log) if spare is not None else None
            if child is None:
                marks = self._ledger.marks(name)
                child = await start_child(self._specs[name], log, marks)
        except OSError as error:
            self._screen.say(f"can't start {name}: {error.strerror}", bad=True)
            self._pending.append(Exited(name, _SPAWN_FAILED))
            return
        with contextlib.suppress(OSError):  # a full disk is no reason to stop serving
            self._ledger.record(name, child.pid)
        self._pending.append(Spawned(name, child.pid))
        tasks.spawn(self._wait_for(name, child), name=f"wait {name}")

    async def _wait_for(self, name: str, child: asyncio.subprocess.Process) -> None:
        code = await child.wait()
        kill_group(child.pid)  # whatever it started
        self._on_exit(name)
        with contextlib.suppress(OSError):
            self._ledger.strike(name)
        await self._events.put(Exited(name, code))

    async def _next_event(self) -> Event:
        if self._pending:
            return self._pending.popleft()
        return await self._events.get()

    async def _tick(self) -> None:
        while True:
            await self._events.put(Tick())
            now_s = self._clock.monotonic()
            if now_s >= self._logs_due_s:
                self._logs_due_s = now_s + LOGS_EVERY_S
                self._watch_logs()
            await self._clock.sleep(TICK_S)

    async def _probe(self, name: str) -> None:
        probe = self._specs[name].probe
        life = self._machine.lives[name]
        while True:
            pid = life.pid
            if pid is not None and life.phase in (Phase.STARTING, Phase.READY):
                result = await ask(probe)
                await self._events.put(Probed(name, pid, result.ready, result.state))
            starting = life.phase is not Phase.READY
            await self._clock.sleep(PROBE_STARTING_S if starting else PROBE_READY_S)

    def _watch_logs(self) -> None:
        for name, log in self._logs.items():
            news = log.news()
            if news and not self._machine.stopping:
                self._screen.quote([f"{name}: {line}" for line in news[-5:]])
            log.bound()

    def _show(self) -> None:
        now_s = self._clock.monotonic()
        rows = [
            Row(
                name=name,
                phase=life.phase,
                state=life.state,
                pid=life.pid,
                address=self._specs[name].address,
                restarts=life.restarts,
                uptime_s=now_s - life.started_s if life.runs else 0.0,
            )
            for name, life in self._machine.lives.items()
        ]
        self._screen.show(rows, self.cluster)


async def _awaited(work: Awaitable[None]) -> None:
    await work
