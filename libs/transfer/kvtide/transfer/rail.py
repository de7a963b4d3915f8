"""The seam between a peer's requests and what carries them."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from kvtide.transfer.errors import TransferError, Unreachable
from kvtide.transfer.requests import Request
from kvtide.transfer.transfer import Transfer

TCP_TIER = 1
"""Below RDMA, which has 0: used while no device works, or for what none takes."""


class RailDownError(Unreachable):
    """The rail could not be opened: nothing of the request was sent on it."""


class Carrier(ABC):
    """Carries requests over one rail.

    It ends every request that it was given with exactly one call of ``report``, when
    it touches the request's memory no more.
    """

    path: str
    """The transport's name, as callers see it."""

    @abstractmethod
    def submit(self, request: Request) -> None:
        """Take a request; never blocks."""

    def at_once(self, request: Request) -> bool:
        """Take a request and send it, if that can be done now; False: nothing was done.

        Never blocks. Once true, it is as any that was given to ``submit``.
        """
        del request
        return False

    def finish(self, request: Request) -> None:
        """Do all for a request in the calling thread, if its turn is now.

        For a thread that waits for it, once ``at_once`` was true.
        """
        del request

    @abstractmethod
    def abort(self, transfer: Transfer | None) -> None:
        """End the requests of a transfer (None: of all, for ever) soon."""

    def help(self, transfer: Transfer) -> None:
        """Do work for ``transfer`` in the calling thread, if that is quicker.

        For a thread that waits for it anyway: saves the way to another and back.
        """
        del transfer

    @abstractmethod
    def join(self) -> None:
        """Wait for the end, after ``abort(None)``."""


Report = Callable[[Request, TransferError | None, bool], None]
"""Of a request, its error if any, and whether the rail is to blame for it."""
