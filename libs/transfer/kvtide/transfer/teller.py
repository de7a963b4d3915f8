"""Tells those who want to know of peers and of their messages."""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvtide.transfer.interface import Notified, PeerGone

log = logging.getLogger("kvtide.transfer")


class Teller:
    """Calls back in an event loop, or without one in one thread of its own.

    Thread-safe. What is told comes in the order in which it was said.
    """

    def __init__(self) -> None:
        """Nobody is told anything before ``start``."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._gone: list[PeerGone] = []
        self._notified: list[Notified] = []

    def start(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Call back in ``loop``; None: in a thread, which starts with the first call."""
        with self._lock:
            self._loop = loop
            if loop is None:
                self._thread = ThreadPoolExecutor(1, "transfer-tell")

    def close(self) -> None:
        """Tell nothing more; waits for a call under way, unless this is one."""
        with self._lock:
            self._loop = None
            thread, self._thread = self._thread, None
        if thread is not None:
            inside = threading.current_thread().name.startswith("transfer-tell")
            thread.shutdown(wait=not inside, cancel_futures=True)

    def on_gone(self, callback: PeerGone) -> None:
        """See ``TransferEndpoint.on_peer_gone``."""
        self._gone.append(callback)

    def on_notified(self, callback: Notified) -> None:
        """See ``TransferEndpoint.on_notification``."""
        self._notified.append(callback)

    def gone(self, node: str, epoch: int) -> None:
        """A peer's process is gone."""
        self._call(lambda: [each(node, epoch) for each in self._gone])

    def notified(self, node: str, epoch: int, message: bytes) -> None:
        """A message has come with a transfer."""
        self._call(lambda: [each(node, epoch, message) for each in self._notified])

    def _call(self, tell: Callable[[], object]) -> None:
        with self._lock:
            loop, thread = self._loop, self._thread
            if thread is not None:
                thread.submit(self._safely, tell)
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(tell)

    def _safely(self, tell: Callable[[], object]) -> None:
        try:
            tell()
        except Exception:
            # as an event loop does
            log.exception("a callback failed")
