"""What can go wrong while bytes move.

TransferError
├── Refused        the other end does not accept us: authentication, protocol, limits
├── Unreachable    nobody answers there (any more)
├── TimedOut       the deadline passed
├── StaleEpoch     the peer, or the handle, is of a process that was replaced
├── AccessDenied   the capability is wrong, expired, or does not allow this
├── OutOfBounds    the range is not inside its region, or a slice makes no sense
├── Corrupt        the bytes that arrived are not the bytes that were sent
└── Cancelled      the caller gave up
"""

# ruff: noqa: N818 - the names say what happened; TransferError says what they are

from typing import ClassVar

from kvtide.runtime import KvtideError


class TransferError(KvtideError):
    """A transfer, or the way to a peer, failed.

    ``node`` is the peer, ``path`` the transport in use ("shm", "tcp", ...), and
    ``slice_index`` the slice of the batch that failed; None where not known.
    """

    kind: ClassVar[str] = "failed"

    def __init__(
        self,
        message: str,
        *,
        node: str | None = None,
        path: str | None = None,
        slice_index: int | None = None,
    ) -> None:
        """Keep where it happened beside the message."""
        super().__init__(message)
        self.message = message
        self.node = node
        self.path = path
        self.slice_index = slice_index

    def __str__(self) -> str:
        """The message, and where it happened as far as known."""
        where = [
            f"{name} {value}"
            for name, value in (
                ("node", self.node),
                ("path", self.path),
                ("slice", self.slice_index),
            )
            if value is not None
        ]
        return f"{self.message} ({', '.join(where)})" if where else self.message


class Refused(TransferError):
    """The other end does not accept us, or we do not accept it."""

    kind = "refused"


class Unreachable(TransferError):
    """Nobody answers at the peer's address, or the peer is gone."""

    kind = "unreachable"


class TimedOut(TransferError):
    """The deadline passed before the work was done."""

    kind = "timed_out"


class StaleEpoch(TransferError):
    """The peer or handle belongs to a process start that is over."""

    kind = "stale_epoch"


class AccessDenied(TransferError):
    """The capability is wrong, expired, or does not allow this access."""

    kind = "access_denied"


class OutOfBounds(TransferError):
    """A slice is not inside its region, or not usable as a slice."""

    kind = "out_of_bounds"


class Corrupt(TransferError):
    """Bytes differ from their checksum, also after the retries."""

    kind = "corrupt"


class Cancelled(TransferError):
    """The caller cancelled the transfer."""

    kind = "cancelled"
