"""Steps that the roles of one process share: chunks of prompts beside decode's rows."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from torch import Tensor

from kvtide.engine.errors import EngineError, StepCancelled
from kvtide.engine.runner import Chunk, Runner
from kvtide.engine.thread import EngineStopped, EngineThread
from kvtide.runtime import Clock
from kvtide.worker.steps import NO_STEP, Running, StepShape

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

STEP_LANE: Final = "step"
"""The engine's lane for the steps of all roles."""

JOIN_TURNS: Final = 4
"""Turns of the loop in which roles that were told of one step's end ask for the next."""


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class StepPart(Generic[T_co]):
    """What one role wants of a step; all of it is called on the engine thread.

    ``begin`` gives the chunks, ``finish`` gets a result for each. ``on_layer`` and
    ``cancelled`` as in ``Runner.step``: what they raise or say ends this part alone.
    One that is ``alone`` shares no step: it may wait for something.
    """

    begin: Callable[[], Sequence[Chunk]]
    finish: Callable[[Sequence[Tensor | None]], T_co]
    on_layer: Callable[[int], None] | None = None
    cancelled: Callable[[], bool] = _never
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Stepped(Generic[T_co]):
    """What came of a part, in a step of ``ms`` that computed ``whole``."""

    result: T_co
    ms: float
    whole: StepShape


@dataclass(slots=True)
class _Entry:
    """A part that waits, or is computed; ``woken`` when it should look again."""

    part: StepPart[Any]
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    chunks: Sequence[Chunk] = ()
    passed: bool = False
    error: BaseException | None = None
    stepped: Stepped[Any] | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, one way or the other."""
        return self.error is not None or self.stepped is not None


class StepMixer:
    """Puts the parts that wait into one step. For one event loop.

    A role has at most one part at a time. The weights are read once for all parts, so
    a decode row beside a chunk costs little more than the chunk.
    """

    def __init__(self, engine: EngineThread, clock: Clock) -> None:
        """Neither is owned."""
        self._engine = engine
        self._clock = clock
        self._waiting: dict[str, _Entry] = {}
        self._running: dict[str, Running] = {}
        self._leading = False

    def runs(self, role: str, running: Running | None) -> None:
        """A role says what it will have in each step from now on; None: nothing."""
        if running is None:
            self._running.pop(role, None)
        else:
            self._running[role] = running

    def beside(self, role: str) -> Running:
        """What the other roles have said: all of it, and the tightest target."""
        others = [one for name, one in self._running.items() if name != role]
        targets = [one.target_ms for one in others if one.target_ms]
        shape = NO_STEP
        for one in others:
            shape = shape.with_shape(one.shape)
        return Running(shape, min(targets, default=0.0))

    async def step(self, role: str, runner: Runner, part: StepPart[T]) -> Stepped[T]:
        """Compute ``part``, together with what others wait for.

        Raises:
            EngineError: the engine refused, or has ended.
            Exception: what the part's own calls raised.
        """
        entry = self._waiting[role] = _Entry(part)
        try:
            while not entry.done:
                if self._leading:
                    await entry.woken.wait()
                    entry.woken.clear()
                else:
                    await self._lead(runner)
        finally:
            if self._waiting.get(role) is entry:
                del self._waiting[role]
        if entry.stepped is None:
            raise entry.error or EngineStopped
        return entry.stepped

    async def _lead(self, runner: Runner) -> None:
        self._leading = True
        entries: list[_Entry] = []
        try:
            for _ in range(JOIN_TURNS):
                await asyncio.sleep(0)
            entries = self._taken()
            if entries:
                await self._engine.run(
                    STEP_LANE, lambda: _compute(runner, entries, self._clock)
                )
        except EngineError as error:
            _give_up(entries, error)
        except asyncio.CancelledError:
            _give_up(entries, EngineStopped())
            raise
        finally:
            self._leading = False
            for entry in [*entries, *self._waiting.values()]:
                entry.woken.set()

    def _taken(self) -> list[_Entry]:
        alone = {r: one for r, one in self._waiting.items() if one.part.alone}
        together = {r: one for r, one in self._waiting.items() if r not in alone}
        passed = {r: one for r, one in alone.items() if one.passed or not together}
        taken = dict(list(passed.items())[:1]) or together
        for one in alone.values():
            one.passed = True
        for role in taken:
            del self._waiting[role]
        return list(taken.values())


def _give_up(entries: Sequence[_Entry], error: BaseException) -> None:
    for entry in entries:
        if not entry.done:
            entry.error = error


def _compute(runner: Runner, entries: Sequence[_Entry], clock: Clock) -> None:
    """One step for all entries; never raises: each entry gets what came of it."""
    started_s = clock.monotonic()
    for entry in entries:
        _guarded(entry, lambda entry=entry: _begin(entry))
    begun = [entry for entry in entries if entry.error is None]
    chunks = [chunk for entry in begun for chunk in entry.chunks]
    try:
        results = runner.step(chunks, lambda i: _layer(begun, i), lambda: _over(begun))
    except Exception as error:  # noqa: BLE001 - it is the parts'
        for entry in begun:
            entry.error = entry.error or error
        return
    at, finished = 0, list[tuple[_Entry, Any]]()
    for entry in begun:
        mine = results[at : at + len(entry.chunks)]
        at += len(entry.chunks)
        if entry.error is None:
            _guarded(
                entry,
                lambda entry=entry, mine=mine: finished.append(
                    (entry, entry.part.finish(mine))
                ),
            )
    spans = [(chunk.start, chunk.start + len(chunk.tokens)) for chunk in chunks]
    ms = (clock.monotonic() - started_s) * 1000
    for entry, result in finished:
        entry.stepped = Stepped(result, ms, StepShape.of(spans))


def _begin(entry: _Entry) -> None:
    entry.chunks = entry.part.begin()


def _layer(entries: Sequence[_Entry], layer: int) -> None:
    for entry in entries:
        on_layer = entry.part.on_layer
        if entry.error is None and on_layer is not None:
            _guarded(entry, lambda on_layer=on_layer: on_layer(layer))
    if all(entry.error is not None for entry in entries):
        raise StepCancelled("no part of the step is wanted any more")


def _over(entries: Sequence[_Entry]) -> bool:
    for entry in entries:
        if entry.error is None and entry.part.cancelled():
            entry.error = StepCancelled("the part was cancelled between two layers")
    return all(entry.error is not None for entry in entries)


def _guarded(entry: _Entry, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - it is this part's alone
        entry.error = error
