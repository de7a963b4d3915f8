"""Threads that ask a system for something again and again."""

import threading
from abc import ABC, abstractmethod
from typing import Self


class Asking(ABC):
    """A few threads that run ``ask`` until the block ends, or it says to end."""

    def __init__(self, threads: int, limit_s: float) -> None:
        """``limit_s`` is far above what an answer takes: what takes longer hangs."""
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self._limit_s = limit_s
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]

    @abstractmethod
    def ask(self) -> bool:
        """Ask once, in one of the threads; false: this thread is to end."""

    def _run(self) -> None:
        while not self.stop.is_set() and self.ask():
            pass

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join(self._limit_s)
        assert not any(thread.is_alive() for thread in self._threads), "a request hangs"
