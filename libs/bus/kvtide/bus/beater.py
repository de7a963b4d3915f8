"""Signs of life: when to beat, in this loop or in a thread of its own.

A beat leaves every ``beat_s``, and soon after a change. If the time between two beats
was longer than ``dead_after_s`` the process was paused (or the machine was): everybody
took it for dead. Then it is fenced before it beats again: it begins a new life, in which
it holds nothing.
"""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from kvtide.bus.codec import Codec
from kvtide.bus.errors import BusError
from kvtide.bus.identity import Identity
from kvtide.bus.link import Link, LinkEvents
from kvtide.bus.roster import RosterTimes
from kvtide.bus.subjects import Subjects
from kvtide.bus.vitals import Vitals
from kvtide.runtime import Clock, TaskScope

log = structlog.get_logger("kvtide.bus.beater")

ASK_AGAIN_S = 0.25
END_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """Seconds. ``beat_gap_s`` is the least time between two beats."""

    beat_s: float = 0.5
    beat_gap_s: float = 0.1
    tick_s: float = 0.25
    roster: RosterTimes = field(default_factory=RosterTimes)


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a beater needs of its node. ``fence`` returns in the new life."""

    vitals: Vitals
    identity: Identity
    subjects: Subjects
    clock: Clock
    times: NodeTimes
    fence: Callable[[], Awaitable[None]]


class Beater(Protocol):
    """Beats until closed."""

    async def start(self, pulse: Pulse) -> None:
        """Begin, with a first beat."""
        ...

    def poke(self) -> None:
        """Something changed: beat soon. From any thread; cheap."""
        ...

    async def close(self) -> None:
        """Beat no more, from before this returns. Idempotent."""
        ...


class _Beats:
    """The loop of beats over one link; in whatever event loop it is run."""

    def __init__(self, pulse: Pulse, link: Link) -> None:
        self._pulse = pulse
        self._link = link
        self._codec = Codec()
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Beat soon; in the loop."""
        self._woken.set()

    async def run(self) -> None:
        """Beat for ever."""
        clock, times = self._pulse.clock, self._pulse.times
        last_s = clock.monotonic()
        async with TaskScope() as tasks:
            while True:
                if clock.monotonic() - last_s > times.roster.dead_after_s:
                    await self._pulse.fence()
                last_s = clock.monotonic()
                self._woken.clear()
                await self._beat()
                await clock.sleep(times.beat_gap_s)
                alarm = tasks.spawn(
                    self._ring(times.beat_s - times.beat_gap_s), name="beat alarm"
                )
                await self._woken.wait()
                alarm.cancel()

    async def _ring(self, seconds: float) -> None:
        await self._pulse.clock.sleep(seconds)
        self._woken.set()

    async def _beat(self) -> None:
        pulse = self._pulse
        node = pulse.identity.current
        body = self._codec.encode_body(pulse.vitals.beat(node))
        data = self._codec.wrap(node, "", body)
        try:
            await self._link.send(pulse.subjects.beat(node.node), data)
        except BusError as error:
            # the next beat is as good; a lost connection is logged by the link
            log.debug("beat not sent", error=str(error))


class TaskBeater:
    """Beats as a task of the loop it is started in: for memory buses."""

    def __init__(self, link: Link) -> None:
        """``link`` is the beater's own, and closed by it."""
        self._link = link
        self._tasks = TaskScope()
        self._beats: _Beats | None = None

    async def start(self, pulse: Pulse) -> None:
        """See ``Beater.start``."""
        self._link.start(LinkEvents(_nothing, _nothing))
        self._beats = _Beats(pulse, self._link)
        self._tasks.spawn(self._beats.run(), name="beater")

    def poke(self) -> None:
        """See ``Beater.poke``; from the loop only."""
        if self._beats is not None:
            self._beats.wake()

    async def close(self) -> None:
        """See ``Beater.close``."""
        await self._tasks.close()
        await self._link.close()


class ThreadBeater:
    """Beats from a thread with its own loop and connection, however busy the rest is."""

    def __init__(self, connect: Callable[[], Awaitable[Link]]) -> None:
        """``connect`` makes the beater's own link; it is called in the thread."""
        self._connect = connect
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beats: _Beats | None = None
        self._main: asyncio.Task[None] | None = None
        self._started = threading.Event()

    async def start(self, pulse: Pulse) -> None:
        """See ``Beater.start``; does not wait for the connection."""
        home = asyncio.get_running_loop()

        async def fence() -> None:
            # the fence is the node's business, and the node lives in its own loop
            done = asyncio.run_coroutine_threadsafe(_as_coroutine(pulse.fence), home)
            await asyncio.wrap_future(done)

        own = Pulse(
            pulse.vitals,
            pulse.identity,
            pulse.subjects,
            pulse.clock,
            pulse.times,
            fence,
        )
        self._thread = threading.Thread(
            target=self._run, args=(own,), name="kvtide-beater", daemon=True
        )
        self._thread.start()
        await asyncio.to_thread(self._started.wait, END_LIMIT_S)

    def poke(self) -> None:
        """See ``Beater.poke``."""
        loop, beats = self._loop, self._beats
        if loop is None or beats is None:
            return
        try:
            loop.call_soon_threadsafe(beats.wake)
        except RuntimeError:
            # the loop has ended in this very moment: no more beats are due
            return

    async def close(self) -> None:
        """See ``Beater.close``."""
        thread, self._thread = self._thread, None
        loop, main = self._loop, self._main
        if thread is None or loop is None or main is None:
            return
        # asked again and again: ``asyncio.wait_for``, which the NATS client uses, can
        # lose a cancellation that comes as its inner wait ends (Python 3.11)
        for _ in range(int(END_LIMIT_S / ASK_AGAIN_S)):
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(main.cancel)
            await asyncio.to_thread(thread.join, ASK_AGAIN_S)
            if not thread.is_alive():
                return
        log.error("the beater does not end", limit_s=END_LIMIT_S)

    def _run(self, pulse: Pulse) -> None:
        try:
            asyncio.run(self._live(pulse))
        except asyncio.CancelledError:
            return
        except Exception:
            # without beats everybody takes this node for dead, as it should be
            log.exception("the beater ended")
        finally:
            self._started.set()

    async def _live(self, pulse: Pulse) -> None:
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        self._started.set()
        link = await self._connect()
        link.start(LinkEvents(_nothing, _nothing))
        try:
            self._beats = _Beats(pulse, link)
            await self._beats.run()
        finally:
            await link.close()


async def _as_coroutine(call: Callable[[], Awaitable[None]]) -> None:
    await call()


def _nothing() -> None:
    return
