"""Whose turn it is to drive a connection: a thread that waits for it, or its own."""

import threading
from collections.abc import Callable

PATROL_S = 0.02
"""A thread that submits and then waits does the work itself, sooner than another would
be awake. Should it not wait, the connection's own thread finds the work after this:
later than what a thread waits for takes, or the two would get in each other's way."""

_PATIENCE_ROUNDS = 10


class Driver:
    """A thread that does what nobody else does; ``busy`` says if there is any.

    ``work`` is done by one thread at a time; the driver's own calls ``leave`` at its end.
    """

    def __init__(
        self,
        name: str,
        busy: Callable[[], bool],
        work: Callable[[], None],
        leave: Callable[[], None],
    ) -> None:
        """``name`` is the thread's. It starts when it is first needed."""
        self._busy = busy
        self._work = work
        self._leave = leave
        self.turn = threading.Lock()
        """Held by whoever works. Taken only without blocking; look at
        ``parked`` and ``missed`` when it was given back."""
        # held, but for the moment of a ring
        self._bell = threading.Lock()
        self._bell.acquire()
        self._ringing = threading.Lock()
        self.parked = True
        """Nobody looks round: work must be told of, by ``nudge``."""
        self.missed = False
        """Somebody did not get the turn, and left work behind."""
        self._closing = False
        self._started = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def nudge(self, *, at_once: bool) -> None:
        """There is work: do it at once, or soon unless somebody else does."""
        if at_once or self.parked:
            self._ring()

    def share(self, work: Callable[[], None]) -> None:
        """Do ``work`` in the calling thread, unless another is at it."""
        if not self.turn.acquire(blocking=False):
            # whoever is at it may leave before our part is done
            self.missed = True
            return
        try:
            work()
        finally:
            self.turn.release()
        if self._busy():
            self.nudge(at_once=self.missed)

    def close(self) -> None:
        """End soon; what ``work`` waits for must have been ended."""
        self._closing = True
        if self._started:
            self._ring()

    def join(self) -> None:
        """Wait for the end, after ``close``."""
        if self._started:
            self._thread.join()

    def _ring(self) -> None:
        with self._ringing:
            if not self._started:
                self._started = True
                self._thread.start()
            if self._bell.locked():
                self._bell.release()

    def _run(self) -> None:
        quiet = 0
        self.parked = False
        while True:
            rung = self._wait(quiet)
            if self._closing:
                break
            if self.turn.acquire(blocking=rung):
                try:
                    quiet = 0 if rung or self._busy() else quiet + 1
                    self.missed = False
                    self._work()
                finally:
                    self.turn.release()
            else:
                quiet = 0
        with self.turn:
            self._leave()

    def _wait(self, quiet: int) -> bool:
        """Whether the bell rang; False when it is time to look round."""
        if quiet < _PATIENCE_ROUNDS:
            return self._bell.acquire(timeout=PATROL_S)
        self.parked = True
        try:
            # what came before we were seen to be parked did not ring
            return self._busy() or self._bell.acquire()
        finally:
            self.parked = False
