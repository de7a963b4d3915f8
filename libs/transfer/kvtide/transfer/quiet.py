"""An observer that may fail without anybody waiting for ever for it."""

import logging

from kvtide.transfer.handles import Operation
from kvtide.transfer.interface import Observer

log = logging.getLogger("kvtide.transfer")


class QuietObserver:
    """Passes all on to an ``Observer``; what that one raises is logged, once per method.

    An observer is called where transfers end and connections are taken: an error of
    its own there would be theirs.
    """

    def __init__(self, observer: Observer) -> None:
        """Pass on to ``observer``."""
        self._observer = observer
        self._said: set[str] = set()

    def transferred(
        self,
        path: str,
        purpose: str,
        operation: Operation,
        nbytes: int,
        seconds: float,
    ) -> None:
        """See ``Observer.transferred``."""
        try:
            self._observer.transferred(path, purpose, operation, nbytes, seconds)
        except Exception:  # noqa: BLE001 - said in ``_complain``
            self._complain("transferred")

    def failed(self, path: str, purpose: str, operation: Operation, kind: str) -> None:
        """See ``Observer.failed``."""
        try:
            self._observer.failed(path, purpose, operation, kind)
        except Exception:  # noqa: BLE001 - said in ``_complain``
            self._complain("failed")

    def retried(self, path: str, purpose: str, reason: str) -> None:
        """See ``Observer.retried``."""
        try:
            self._observer.retried(path, purpose, reason)
        except Exception:  # noqa: BLE001 - said in ``_complain``
            self._complain("retried")

    def served(
        self, path: str, purpose: str, operation: Operation, nbytes: int
    ) -> None:
        """See ``Observer.served``."""
        try:
            self._observer.served(path, purpose, operation, nbytes)
        except Exception:  # noqa: BLE001 - said in ``_complain``
            self._complain("served")

    def refused(self, reason: str) -> None:
        """See ``Observer.refused``."""
        try:
            self._observer.refused(reason)
        except Exception:  # noqa: BLE001 - said in ``_complain``
            self._complain("refused")

    def _complain(self, method: str) -> None:
        if method not in self._said:
            self._said.add(method)
            # called where it was caught
            log.exception("the observer failed at %r (said once)", method)  # noqa: LOG004
