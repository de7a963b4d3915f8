"""One thread for all engine work of a process, shared fairly by its roles."""
# ruff: noqa: N818  names say what happened

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import structlog

from kvtide.engine.errors import EngineError
from kvtide.engine.loading import LoadedModel

T = TypeVar("T")

QUEUED_LIMIT: Final = 1024

log = structlog.get_logger("kvtide.engine")


class EngineStopped(EngineError):
    """The engine thread ends; the work was not done."""

    def __init__(self) -> None:
        super().__init__("the engine thread has ended; the work was not done")


class EngineBusy(EngineError):
    """More work waits for the engine than may."""

    def __init__(self, lane: str) -> None:
        super().__init__(f"more than {QUEUED_LIMIT} pieces of work wait in lane {lane}")
        self.lane = lane


class _Work(Generic[T]):
    """A function to be called in the thread, and whom to tell."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()

    def run(self) -> None:
        try:
            result = self._call()
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self._tell(self._fail, error)
        else:
            self._tell(self._succeed, result)

    def refuse(self) -> None:
        self._tell(self._fail, EngineStopped())

    def _tell(self, outcome: Callable[[Any], None], value: object) -> None:
        # the loop may have ended while the work ran: then nobody waits for it
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(outcome, value)

    def _succeed(self, result: T) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def _fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class EngineThread:
    """Loads the model and then does all work on it, a piece at a time.

    Torch's compute threads belong to the thread that uses them, so everything that
    computes is done in this one. Work waits in lanes, and lanes take turns: a prefill
    chunk, a decode step, a prefill chunk. Results and errors go to the loop that asked.
    """

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        unload: Callable[[LoadedModel], None] | None = None,
    ) -> None:
        """``load`` is called once, in the thread, after ``start``; ``unload`` last."""
        self._load = load
        self._unload = unload
        self._lanes: dict[str, deque[_Work[Any]]] = {}
        self._claims: set[str] = set()
        self._running = ""
        self._wake = threading.Condition()
        self._stopping = False
        self._loaded: LoadedModel | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loading: _Work[LoadedModel] | None = None

    def start(self) -> None:
        """Begin to load the model. Call it once, from the loop."""
        self._loading = _Work(self._load_once)
        # a failure nobody waits for yet is no surprise at exit
        self._loading.future.add_done_callback(_seen)
        self._thread.start()

    async def model(self) -> LoadedModel:
        """The model, as soon as it is loaded.

        Raises:
            EngineError: it can't be loaded; whatever ``load`` raised.
        """
        if self._loading is None:
            raise EngineStopped
        return await asyncio.shield(self._loading.future)

    async def failed_or(self, stop: asyncio.Event) -> None:
        """Wait until ``stop`` is set; a model that can't be loaded ends it at once.

        Raises:
            EngineError: as ``model``.
        """
        waiting = asyncio.ensure_future(stop.wait())
        loading = asyncio.ensure_future(self.model())
        try:
            await asyncio.wait({waiting, loading}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
            await waiting
        finally:
            waiting.cancel()
            loading.cancel()

    async def run(self, lane: str, call: Callable[[], T]) -> T:
        """Call ``call`` in the thread, in turn; what it returns or raises.

        If the waiting task is cancelled before its turn, ``call`` is never called;
        afterwards it runs to its end and the result is dropped.

        Raises:
            EngineStopped: the thread ends.
            EngineBusy: too much work waits in this lane.
        """
        work = _Work(call)
        with self._wake:
            if self._stopping:
                raise EngineStopped
            queue = self._lanes.setdefault(lane, deque())
            if len(queue) >= QUEUED_LIMIT:
                raise EngineBusy(lane)
            queue.append(work)
            self._wake.notify()
        try:
            return await work.future
        except asyncio.CancelledError:
            with self._wake:
                if work in queue:
                    queue.remove(work)
            raise

    def claim(self, lane: str, *, wanted: bool) -> None:
        """Say that this lane will (or will no longer) bring work again and again.

        Others should keep their pieces short meanwhile; see ``contended``.
        """
        with self._wake:
            if wanted:
                self._claims.add(lane)
            else:
                self._claims.discard(lane)

    def contended(self, lane: str) -> bool:
        """Whether another lane claims the engine, or has work. From any thread."""
        with self._wake:
            waiting = any(queue for name, queue in self._lanes.items() if name != lane)
            claimed = any(name != lane for name in self._claims)
            return claimed or waiting or self._running not in ("", lane)

    async def close(self, *, timeout_s: float = 10.0) -> None:
        """Refuse what waits, let what runs end, end the thread. Idempotent.

        A thread that does not end within ``timeout_s`` is left: it is a daemon.
        """
        with self._wake:
            self._stopping = True
            refused = [work for queue in self._lanes.values() for work in queue]
            self._lanes.clear()
            self._wake.notify()
        for work in refused:
            work.refuse()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, timeout_s)
            if self._thread.is_alive():
                log.warning("engine thread left behind", waited_s=timeout_s)

    def _load_once(self) -> LoadedModel:
        self._loaded = self._load()
        return self._loaded

    def _run(self) -> None:
        if self._loading is not None:
            self._loading.run()
        try:
            self._work()
        finally:
            if self._loaded is not None and self._unload is not None:
                self._unload(self._loaded)

    def _work(self) -> None:
        while True:
            with self._wake:
                self._running = ""
                while not self._stopping and not any(self._lanes.values()):
                    self._wake.wait()
                if self._stopping:
                    return
                lane, work = self._next()
                self._running = lane
            work.run()
            del work  # its memory is not to be kept until the next piece comes

    def _next(self) -> tuple[str, _Work[Any]]:
        """The oldest work of the lane whose turn is the longest ago."""
        lane = next(name for name, queue in self._lanes.items() if queue)
        queue = self._lanes.pop(lane)
        self._lanes[lane] = queue  # to the end of the line
        return lane, queue.popleft()


def _seen(future: asyncio.Future[LoadedModel]) -> None:
    if not future.cancelled():
        future.exception()
