"""The threads that wait for one peer's answers; few may wait for them."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from kvtide.transfer.errors import Refused

THREADS = 2
"""Made when they are needed."""

MOST_WAITING = 16_384
"""Questions that wait for a thread: 256 GiB of a region that is reached for the first time."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Asking(ThreadPoolExecutor):
    """See the module."""

    def __init__(self, node: str, most_waiting: int = MOST_WAITING) -> None:
        """For the answers of ``node``."""
        super().__init__(THREADS, f"transfer-ask-{node}")
        self._node = node
        self._most_waiting = most_waiting

    def submit(
        self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> Future[_T]:
        """As an ``Executor``.

        Raises:
            Refused: as many as may wait already do.
            RuntimeError: it is shut down.
        """
        waiting: Any = self._work_queue
        if waiting.qsize() >= self._most_waiting:
            raise Refused(
                f"{self._most_waiting} questions wait for the peer's answers already: "
                "wait for transfers before you begin more",
                node=self._node,
            )
        return super().submit(fn, *args, **kwargs)
