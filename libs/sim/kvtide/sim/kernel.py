"""Virtual time: what happens when, and coroutines that wait for it. Deterministic.

A kernel runs calls in the order of their time, and of their making where the times are
equal. Everything belongs to a life (a process): what a dead life still had to do is
never done, what a paused one had to do is done when it goes on. Coroutines may await a
``Promise``, and nothing of asyncio.
"""

import heapq
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar, cast

from kvtide.runtime import TaskScope

T = TypeVar("T")


class Life:
    """One life of a simulated process.

    ``slowness``: how many times longer its work takes than it should. ``wall_ahead_s``:
    how far its wall clock is ahead of the truth. ``tasks``: coroutines that it runs.
    """

    def __init__(self, name: str) -> None:
        """Alive from now on."""
        self.name = name
        self.alive = True
        self.paused_until_s = 0.0
        self.slowness = 1.0
        self.wall_ahead_s = 0.0
        self.tasks = 0


class Promise(Generic[T]):
    """A value that will be there later; for one kernel."""

    def __init__(self, kernel: "Kernel") -> None:
        """Not there yet."""
        self._kernel = kernel
        self._waiting: list[Callable[[], None]] = []
        self._value: T | None = None
        self._error: Exception | None = None
        self.done = False

    def set(self, value: T) -> None:
        """It is there. Only the first call counts."""
        if not self.done:
            self._value = value
            self._wake()

    def fail(self, error: Exception) -> None:
        """It will never be there, for this reason. Only the first call counts."""
        if not self.done:
            self._error = error
            self._wake()

    def when_done(self, call: Callable[[], None]) -> None:
        """Have ``call`` called, soon after it is there."""
        if self.done:
            self._kernel.at(0.0, call)
        else:
            self._waiting.append(call)

    def _wake(self) -> None:
        self.done = True
        for call in self._waiting:
            self._kernel.at(0.0, call)
        self._waiting.clear()

    def __await__(self) -> Generator["Promise[T]", None, T]:
        """Wait for it.

        Raises:
            Exception: what it failed with.
        """
        if not self.done:
            yield self
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


class Kernel:
    """The one source of time and order of a simulation."""

    def __init__(self, start_s: float = 1000.0) -> None:
        """Nothing is to be done yet."""
        self.now_s = start_s
        self.failures: list[BaseException] = []
        self._made = 0
        self._due: list[tuple[float, int, Life | None, Callable[[], None]]] = []

    def at(
        self, delay_s: float, call: Callable[[], None], life: Life | None = None
    ) -> None:
        """Do ``call`` after ``delay_s``, unless ``life`` has ended by then."""
        self._made += 1
        due_s = self.now_s + max(0.0, delay_s)
        heapq.heappush(self._due, (due_s, self._made, life, call))

    def sleep(self, seconds: float, life: Life | None = None) -> Promise[None]:
        """Something to await for ``seconds``."""
        promise: Promise[None] = Promise(self)
        self.at(seconds, lambda: promise.set(None), life)
        return promise

    def work(self, seconds: float, life: Life) -> Promise[None]:
        """``sleep`` for what takes ``seconds`` of a process that is not slow."""
        return self.sleep(seconds * life.slowness, life)

    def spawn(self, coro: Coroutine[Any, Any, Any], life: Life) -> None:
        """Run a coroutine from now on, as long as ``life`` lives.

        What it raises is kept in ``failures``: in a simulation that is a bug found.
        """
        life.tasks += 1
        self._advance(coro, life)

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end_s = self.now_s + seconds
        while self._due and self._due[0][0] <= end_s:
            self._step()
        self.now_s = end_s

    def _step(self) -> None:
        due_s, made, life, call = heapq.heappop(self._due)
        if life is not None:
            if not life.alive:
                return
            if life.paused_until_s > due_s:
                entry = (life.paused_until_s, made, life, call)
                heapq.heappush(self._due, entry)
                return
        self.now_s = max(self.now_s, due_s)
        call()

    def _advance(self, coro: Coroutine[Any, Any, Any], life: Life) -> None:
        if not life.alive:
            coro.close()
            return
        try:
            waited = coro.send(None)
        except StopIteration:
            life.tasks -= 1
            return
        except Exception as error:  # noqa: BLE001 - the checker reports it
            life.tasks -= 1
            self.failures.append(error)
            return
        if not isinstance(waited, Promise):
            coro.close()
            message = f"{coro!r} awaits something that is not of this kernel"
            raise TypeError(message)
        promise = cast("Promise[Any]", waited)
        promise.when_done(lambda: self.at(0.0, lambda: self._advance(coro, life), life))


class SimClock:
    """``kvtide.runtime.Clock`` in virtual time, for one life."""

    def __init__(self, kernel: Kernel, life: Life) -> None:
        """Show the kernel's time."""
        self._kernel = kernel
        self._life = life

    def monotonic(self) -> float:
        """See ``Clock.monotonic``."""
        return self._kernel.now_s

    def wall(self) -> float:
        """See ``Clock.wall``; as wrong as this life's clock is."""
        return self._kernel.now_s + self._life.wall_ahead_s

    async def sleep(self, seconds: float) -> None:
        """See ``Clock.sleep``."""
        await self._kernel.sleep(seconds, self._life)


class SimTasks(TaskScope):
    """A task scope whose tasks run in virtual time and end with their life."""

    def __init__(self, kernel: Kernel, life: Life) -> None:
        """No task yet."""
        super().__init__()
        self._kernel = kernel
        self._life = life

    def spawn(self, coro: Coroutine[Any, Any, Any], *, name: str) -> Any:
        """See ``TaskScope.spawn``; there is no handle."""
        del name
        self._kernel.spawn(coro, self._life)

    async def close(self, *, timeout_s: float = 5.0) -> None:
        """Nothing to do: tasks end with their life."""
        del timeout_s
