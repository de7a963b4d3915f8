"""Where a step waits for the layers of a prefix that is still being loaded."""

import threading
from collections.abc import Callable

from kvtide.prefill.errors import LoadFellShort

POLL_S = 0.02


class LoadGate:
    """How many layers of one load are in the run. From the loop and the engine thread."""

    def __init__(self, limit_s: float) -> None:
        """No layer yet; nobody waits longer than ``limit_s`` for the next one."""
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._layers = 0
        self._whole = False
        self._short = False

    def reached(self, layers: int) -> None:
        """The first ``layers`` are in the run, verified."""
        with self._changed:
            self._layers = layers
            self._changed.notify_all()

    def ended(self, *, whole: bool) -> None:
        """Nothing more comes: all is there, or some of it is not. The first word counts."""
        with self._changed:
            if not self._whole and not self._short:
                self._whole, self._short = whole, not whole
                self._changed.notify_all()

    def wait(self, layer: int, in_vain: Callable[[], bool]) -> None:
        """Block until ``layer`` is in the run.

        Raises:
            LoadFellShort: it will not be, takes too long, or nobody should wait for it
                any more (``in_vain``); what depends on it is to be computed again.
        """
        with self._changed:
            left_s = self._limit_s
            while not (self._whole or self._short or self._layers > layer):
                if left_s <= 0 or in_vain():
                    raise LoadFellShort(layer)
                if not self._changed.wait(POLL_S):
                    left_s -= POLL_S
            if self._short:
                raise LoadFellShort(layer)
