"""Decides what the supervisor does: events in, commands out. Pure.

A process goes WAITING → STARTING → READY; when it exits unasked it is started again, the
first time at once, later after a BACKOFF. ``StopAsked`` ends the processes one stop stage after the other.
"""

from dataclasses import dataclass, field
from enum import StrEnum

FIRST_BACKOFF_S = 0.5
MOST_BACKOFF_S = 30.0
STABLE_AFTER_S = 10.0
"""A process that ran so long starts with no back-off again."""

MOST_FAILED_STARTS = 5
"""A process that never got ready is given up after so many exits."""

BAD_SETTINGS = 2
"""The exit code of a role that refuses its settings: trying again is pointless."""


class Phase(StrEnum):
    """Where a process is in its life."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    BACKOFF = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Member:
    """A process to keep running; lower stages start first, and stop first."""

    name: str
    start_stage: int
    stop_stage: int


@dataclass(frozen=True, slots=True)
class Spawned:
    """The process runs."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class Exited:
    """The process ended: its exit code, or minus the signal."""

    name: str
    code: int


@dataclass(frozen=True, slots=True)
class Probed:
    """The process ``pid`` was asked whether it is ready; ``state`` is what it said."""

    name: str
    pid: int
    ready: bool
    state: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """A person or a signal wants the end; asked twice, at once."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Spawned | Exited | Probed | StopAsked | Tick


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the process."""

    name: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask the process to end."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process and its group now."""

    name: str


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the person; ``name`` is whose log belongs to it, if any."""

    text: str
    name: str = ""
    bad: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """All processes are gone: leave with ``code``."""

    code: int


Command = Spawn | Terminate | Kill | Say | Finish


@dataclass(slots=True)
class Life:
    """What is known of one process; read it, don't change it."""

    member: Member
    phase: Phase = Phase.WAITING
    pid: int | None = None
    state: str = ""
    started_s: float = 0.0
    resume_s: float = 0.0
    stop_by_s: float = 0.0
    failures: int = 0
    restarts: int = 0
    was_ready: bool = False
    killed: bool = False

    @property
    def runs(self) -> bool:
        """Whether there is, or is about to be, a process."""
        return self.phase in (Phase.STARTING, Phase.READY, Phase.STOPPING)


@dataclass(slots=True)
class Supervision:
    """The state of all processes.

    ``grace_s`` is how long a stage may take to end by itself before it is killed.
    """

    members: tuple[Member, ...]
    grace_s: float = 8.0
    lives: dict[str, Life] = field(init=False)
    _stopping: bool = field(default=False, init=False)
    _code: int = field(default=0, init=False)
    _finished: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Nothing runs yet; the first ``Tick`` starts the first stage."""
        self.lives = {member.name: Life(member) for member in self.members}

    @property
    def all_ready(self) -> bool:
        """Whether every process is ready now."""
        return all(life.phase is Phase.READY for life in self.lives.values())

    @property
    def stopping(self) -> bool:
        """Whether the end was asked for, or has become unavoidable."""
        return self._stopping

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Take an event; returns what to do, in order."""
        if isinstance(event, Spawned):
            return self._spawned(self.lives[event.name], event)
        if isinstance(event, Exited):
            return self._exited(self.lives[event.name], event.code, now_s)
        if isinstance(event, Probed):
            return self._probed(self.lives[event.name], event, now_s)
        if isinstance(event, StopAsked):
            return self._stop(now_s, code=0)
        return self._advance(now_s)

    def _spawned(self, life: Life, event: Spawned) -> list[Command]:
        life.pid = event.pid
        if life.phase is Phase.STOPPING:
            # the end was asked for while it started
            return [Terminate(life.member.name)]
        return []

    def _probed(self, life: Life, event: Probed, now_s: float) -> list[Command]:
        if life.phase not in (Phase.STARTING, Phase.READY) or life.pid != event.pid:
            return []  # the answer of one that is gone
        life.state = event.state
        if not event.ready:
            # a ready process that is busy or draining stays up: it isn't ours to judge
            return []
        if life.phase is Phase.STARTING:
            life.phase = Phase.READY
            life.was_ready = True
            said = f"{life.member.name} is ready again" if life.restarts else ""
            return [*([Say(said)] if said else []), *self._advance(now_s)]
        return []

    def _exited(self, life: Life, code: int, now_s: float) -> list[Command]:
        name, ready = life.member.name, life.phase is Phase.READY
        life.pid = None
        life.state = ""
        if self._stopping:
            life.phase = Phase.STOPPED
            return self._advance(now_s)
        if ready and now_s - life.started_s >= STABLE_AFTER_S:
            life.failures = 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if not life.was_ready and code == BAD_SETTINGS:
            life.phase = Phase.STOPPED
            text = f"{name} refuses its settings"
            return [Say(text, name, bad=True), *self._stop(now_s, code=BAD_SETTINGS)]
        life.failures += 1
        if life.was_ready and life.failures == 1:
            life.restarts += 1
            return [
                Say(f"{name} {how}; starting it again", name, bad=True),
                self._start(life, now_s),
            ]
        if not life.was_ready and life.failures >= MOST_FAILED_STARTS:
            life.phase = Phase.STOPPED
            text = (
                f"{name} {how}, {life.failures} times without getting ready; giving up"
            )
            return [Say(text, name, bad=True), *self._stop(now_s, code=1)]
        doublings = life.failures - 1 - life.was_ready
        wait_s = min(FIRST_BACKOFF_S * 2**doublings, MOST_BACKOFF_S)
        life.phase = Phase.BACKOFF
        life.resume_s = now_s + wait_s
        return [Say(f"{name} {how}; starting it again in {wait_s:g} s", name, bad=True)]

    def _stop(self, now_s: float, *, code: int) -> list[Command]:
        if self._stopping:
            return self._hurry()
        self._stopping = True
        self._code = code
        for life in self.lives.values():
            if life.phase in (Phase.WAITING, Phase.BACKOFF):
                life.phase = Phase.STOPPED
        return self._advance(now_s)

    def _hurry(self) -> list[Command]:
        """Asked again: no more patience."""
        commands: list[Command] = []
        for life in self.lives.values():
            if life.runs and not life.killed:
                life.phase = Phase.STOPPING
                life.killed = True
                commands.append(Kill(life.member.name))
        return commands

    def _advance(self, now_s: float) -> list[Command]:
        return self._advance_stop(now_s) if self._stopping else self._advance_up(now_s)

    def _advance_up(self, now_s: float) -> list[Command]:
        due = [
            life
            for life in self.lives.values()
            if life.phase is Phase.BACKOFF and now_s >= life.resume_s
        ]
        for life in due:
            life.restarts += 1
        unready = [life for life in self.lives.values() if not life.was_ready]
        if unready:
            stage = min(life.member.start_stage for life in unready)
            due += [
                life
                for life in unready
                if life.phase is Phase.WAITING and life.member.start_stage == stage
            ]
        return [self._start(life, now_s) for life in due]

    @staticmethod
    def _start(life: Life, now_s: float) -> Spawn:
        life.phase = Phase.STARTING
        life.started_s = now_s
        return Spawn(life.member.name)

    def _advance_stop(self, now_s: float) -> list[Command]:
        running = [life for life in self.lives.values() if life.runs]
        if not running:
            if self._finished:
                return []
            self._finished = True
            return [Finish(self._code)]
        stage = min(life.member.stop_stage for life in running)
        commands: list[Command] = []
        for life in running:
            if life.member.stop_stage != stage:
                continue
            if life.phase is not Phase.STOPPING:
                life.phase = Phase.STOPPING
                life.stop_by_s = now_s + self.grace_s
                commands.append(Terminate(life.member.name))
            elif now_s >= life.stop_by_s and not life.killed:
                life.killed = True
                text = f"{life.member.name} did not end within {self.grace_s:g} s"
                commands += [Say(text, bad=True), Kill(life.member.name)]
        return commands
