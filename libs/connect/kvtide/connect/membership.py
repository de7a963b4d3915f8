"""A thread with a loop of its own that keeps this process a member of the cluster."""

import asyncio
import concurrent.futures
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import structlog

from kvtide.connect.index import BlockIndex
from kvtide.connect.session import Session, open_session
from kvtide.connect.settings import ConnectSettings
from kvtide.runtime import Clock, KvtideError

T = TypeVar("T")

log = structlog.get_logger("kvtide.connect")

END_LIMIT_S = 10.0
_REJOIN_S = 1.0


class Away(Exception):  # noqa: N818 - inside this package: becomes a miss
    """It can't be done now; ``timed_out``: it took too long."""

    def __init__(self, reason: str, *, timed_out: bool = False) -> None:
        """Say why."""
        super().__init__(reason)
        self.timed_out = timed_out


class Membership:
    """Joins, stays and rejoins by itself; other threads have work done in its loop.

    The engine's threads never run the loop's callbacks and never wait without a limit.
    """

    def __init__(
        self, settings: ConnectSettings, index: BlockIndex, clock: Clock
    ) -> None:
        """Nothing runs before ``start``."""
        self._settings = settings
        self._index = index
        self._clock = clock
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._session: Session | None = None
        # an interpreter that ends must not wait for a loop that hangs
        self._thread = threading.Thread(
            target=self._run, name="kvtide-connect", daemon=True
        )

    def start(self) -> None:
        """Begin to join."""
        self._thread.start()

    @property
    def session(self) -> Session | None:
        """The stay in the cluster; None: not joined yet, or not any more."""
        return self._session

    def call(
        self, work: Callable[[Session], Coroutine[Any, Any, T]], limit_s: float
    ) -> T:
        """Have ``work`` done in the loop, and wait for it at most ``limit_s``.

        Raises:
            Away: not joined, it failed, or it took longer and was cancelled.
        """
        future = self.begin(work)
        try:
            return future.result(max(0.0, limit_s))
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise Away("no answer in time", timed_out=True) from None
        except concurrent.futures.CancelledError:
            raise Away("the connector ends") from None
        except KvtideError as error:
            raise Away(str(error)) from error
        except Exception as error:
            # an engine must not fail because its cache does
            log.exception("connector_failed")
            raise Away(repr(error)) from error

    def begin(
        self, work: Callable[[Session], Coroutine[Any, Any, T]]
    ) -> "concurrent.futures.Future[T]":
        """Have ``work`` done in the loop and go on.

        Raises:
            Away: not joined.
        """
        session = self._session
        if session is None or not self._thread.is_alive():
            raise Away("not joined")
        doing = work(session)
        try:
            return asyncio.run_coroutine_threadsafe(doing, self._loop)
        except RuntimeError as error:
            # the loop was closed just now
            doing.close()
            raise Away("the connector has ended") from error

    def close(self) -> None:
        """Leave the cluster and end the thread, in bounded time. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(END_LIMIT_S)

    # ---- in the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._belong())
        finally:
            self._session = None
            self._loop.close()

    async def _belong(self) -> None:
        with tempfile.TemporaryDirectory(prefix="kvtide-connect-") as folder:
            while not self._stop.is_set():
                stay = asyncio.ensure_future(self._stay(Path(folder)))
                stop = asyncio.ensure_future(self._stop.wait())
                await asyncio.wait((stay, stop), return_when="FIRST_COMPLETED")
                stop.cancel()
                if not stay.done():
                    stay.cancel()
                await self._ended(stay)
                if not self._stop.is_set():
                    await self._clock.sleep(_REJOIN_S)

    async def _stay(self, folder: Path) -> None:
        async with open_session(
            self._settings, folder, self._index, self._clock
        ) as session:
            log.info("joined")
            self._session = session
            try:
                await self._stop.wait()
            finally:
                self._session = None

    async def _ended(self, stay: Awaitable[None]) -> None:
        try:
            await stay
        except asyncio.CancelledError:
            log.debug("left")
        except Exception:
            # whatever it was, the engine runs on without a pool until it is over
            log.exception("membership_failed")
