"""Errors of the pool's client.

KvtideError
└── PoolError
    ├── PoolUnavailable   no store takes our blocks now: go on without pooling
    └── PutClosed         this put is over: stop writing into it
"""

from kvtide.runtime import KvtideError


class PoolError(KvtideError):
    """The pool can't do this now."""


class PoolUnavailable(PoolError):  # noqa: N818 - a state of the pool, as callers say it
    """No store takes blocks of this process now; go on without pooling.

    ``code`` is a short stable word: ``no_store``, ``no_answer``, ``fenced``, or the
    store's own.
    """

    def __init__(self, message: str, *, code: str) -> None:
        """Keep the code beside the message."""
        super().__init__(message)
        self.code = code


class PutClosed(PoolError):  # noqa: N818 - a state of the put
    """The put was released, fenced, or its store is gone: its slots are not ours."""
