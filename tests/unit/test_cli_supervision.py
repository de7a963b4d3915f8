"""The supervisor's decisions, without a process."""

from hypothesis import given, settings, strategies as st

from kvtide.cli.supervisor.machine import (
    MOST_FAILED_STARTS,
    STABLE_AFTER_S,
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

MEMBERS = (Member("bus", 0, 9), Member("store", 1, 2), Member("gateway", 1, 1))


def acts(commands: list[Command]) -> list[Command]:
    return [command for command in commands if not isinstance(command, Say)]


def ready(machine: Supervision, now_s: float = 0.0) -> None:
    """Bring all up, as a shell would."""
    todo = machine.handle(Tick(), now_s)
    pid = 100
    while todo:
        command = todo.pop(0)
        if isinstance(command, Spawn):
            pid += 1
            todo += machine.handle(Spawned(command.name, pid), now_s)
            todo += machine.handle(Probed(command.name, pid, True, ""), now_s)
    assert machine.all_ready


def crash(machine: Supervision, name: str, now_s: float, code: int = -9) -> float:
    """Kill it; returns when it is started again, having let that happen."""
    if acts(machine.handle(Exited(name, code), now_s)) == [Spawn(name)]:
        machine.handle(Spawned(name, 7), now_s)
        return now_s
    resume_s = machine.lives[name].resume_s
    assert acts(machine.handle(Tick(), resume_s - 0.01)) == []
    assert acts(machine.handle(Tick(), resume_s)) == [Spawn(name)]
    machine.handle(Spawned(name, 7), resume_s)
    return resume_s


def test_stages_start_one_after_the_other() -> None:
    machine = Supervision(MEMBERS)
    assert machine.handle(Tick(), 0.0) == [Spawn("bus")]
    assert machine.handle(Tick(), 0.1) == []
    machine.handle(Spawned("bus", 1), 0.2)
    assert machine.handle(Probed("bus", 1, False, "loading"), 0.3) == []
    assert machine.lives["bus"].state == "loading"
    assert machine.handle(Probed("bus", 1, True, ""), 0.4) == [
        Spawn("store"),
        Spawn("gateway"),
    ]
    assert not machine.all_ready


def test_the_answer_of_an_earlier_process_counts_for_nothing() -> None:
    machine = Supervision(MEMBERS)
    machine.handle(Tick(), 0.0)
    machine.handle(Spawned("bus", 2), 0.0)
    assert machine.handle(Probed("bus", 1, True, ""), 0.1) == []
    assert machine.lives["bus"].phase is Phase.STARTING


def test_back_off_doubles_and_is_forgotten_after_a_stable_time() -> None:
    machine = Supervision(MEMBERS)
    ready(machine)
    now_s = 10.0
    waits: list[float] = []
    for _ in range(8):
        again_s = crash(machine, "store", now_s)
        waits.append(again_s - now_s)
        machine.handle(Probed("store", 7, True, ""), again_s)
        now_s = again_s + 1
    assert waits == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    now_s += STABLE_AFTER_S
    assert crash(machine, "store", now_s) == now_s
    assert machine.lives["store"].restarts == 9


def test_a_stop_goes_by_stages_and_kills_what_takes_too_long() -> None:
    machine = Supervision(MEMBERS, grace_s=5.0)
    ready(machine)
    assert machine.handle(StopAsked(), 1.0) == [Terminate("gateway")]
    assert machine.handle(Tick(), 5.9) == []
    assert acts(machine.handle(Tick(), 6.0)) == [Kill("gateway")]
    assert machine.handle(Tick(), 7.0) == []
    assert machine.handle(Exited("gateway", -9), 7.1) == [Terminate("store")]
    assert machine.handle(Exited("store", 0), 7.2) == [Terminate("bus")]
    assert machine.handle(Exited("bus", 1), 7.3) == [Finish(0)]
    assert machine.handle(Tick(), 8.0) == []


def test_asked_twice_it_kills_all() -> None:
    machine = Supervision(MEMBERS)
    ready(machine)
    machine.handle(StopAsked(), 1.0)
    again = machine.handle(StopAsked(), 1.1)
    assert again == [Kill("bus"), Kill("store"), Kill("gateway")]
    assert machine.handle(StopAsked(), 1.2) == []


def test_a_process_that_starts_during_the_stop_is_ended() -> None:
    machine = Supervision(MEMBERS)
    machine.handle(Tick(), 0.0)
    assert machine.handle(StopAsked(), 0.1) == [Terminate("bus")]
    assert machine.handle(Spawned("bus", 5), 0.2) == [Terminate("bus")]
    assert machine.handle(Exited("bus", 0), 0.3) == [Finish(0)]


def test_refused_settings_end_all_but_only_before_it_was_ready() -> None:
    machine = Supervision(MEMBERS)
    ready(machine)
    crash(machine, "store", 1.0, code=2)
    fresh = Supervision(MEMBERS)
    fresh.handle(Tick(), 0.0)
    fresh.handle(Spawned("bus", 1), 0.0)
    commands = fresh.handle(Exited("bus", 2), 0.1)
    assert acts(commands) == [Finish(2)]


def test_it_gives_up_what_never_gets_ready() -> None:
    machine = Supervision(MEMBERS)
    assert machine.handle(Tick(), 0.0) == [Spawn("bus")]
    now_s = 0.0
    for _ in range(MOST_FAILED_STARTS - 1):
        now_s = crash(machine, "bus", now_s, code=1)
    assert acts(machine.handle(Exited("bus", 1), now_s)) == [Finish(1)]


names = st.sampled_from(["bus", "store", "gateway"])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("exit"), names, st.sampled_from([0, 1, 2, -9])),
        st.tuples(st.just("ready"), names, st.just(0)),
        st.tuples(st.just("tick"), names, st.just(0)),
        st.tuples(st.just("stop"), names, st.just(0)),
    ),
    max_size=60,
)


class World:
    """Does what the machine says and counts."""

    def __init__(self) -> None:
        self.machine = Supervision(MEMBERS, grace_s=5.0)
        self.running: set[str] = set()
        self.finished = 0
        self.now_s = 0.0

    def tell(self, event: Event) -> None:
        for command in self.machine.handle(event, self.now_s):
            if isinstance(command, Spawn):
                assert command.name not in self.running
                assert not self.machine.stopping
                self.running.add(command.name)
                self.tell(Spawned(command.name, 1))
            elif isinstance(command, Finish):
                assert self.running == set()
                self.finished += 1
            elif isinstance(command, (Terminate, Kill)):
                assert command.name in self.running

    def exit(self, name: str, code: int) -> None:
        if name in self.running:
            self.running.discard(name)
            self.tell(Exited(name, code))

    def step(self, kind: str, name: str, code: int) -> None:
        self.now_s += 1.0
        if kind == "exit":
            self.exit(name, code)
        elif kind == "ready":
            self.tell(Probed(name, 1, True, ""))
        else:
            self.tell(StopAsked() if kind == "stop" else Tick())


@given(steps)
@settings(max_examples=300, deadline=None)
def test_whatever_happens_there_is_one_process_of_each_and_an_end(
    script: list[tuple[str, str, int]],
) -> None:
    world = World()
    world.tell(Tick())
    for kind, name, code in script:
        world.step(kind, name, code)
    world.tell(StopAsked())
    for _ in range(10):
        world.now_s += 10.0
        world.tell(Tick())
        for name in sorted(world.running):
            # the store ends by itself, the others only when they are killed
            if world.machine.lives[name].killed or name == "store":
                world.exit(name, -9)
    assert world.running == set()
    assert world.finished == 1
