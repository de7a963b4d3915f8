"""Which leases this process holds at the store, by the puts that are open. Pure."""

from kvtide.kv import Lease, RequestRef


class Ledger:
    """Counts the open puts of each lease: the last one to end ends the lease.

    A process with two roles may have puts of both under one lease, and neither
    must end what the other still needs.
    """

    def __init__(self) -> None:
        """Nothing is held."""
        self._open: dict[Lease, int] = {}
        self.puts = 0

    def open(self, lease: Lease) -> None:
        """A put begins; call before the store is asked."""
        self._open[lease] = self._open.get(lease, 0) + 1
        self.puts += 1

    def close(self, lease: Lease) -> bool:
        """A put ends; true: it was the lease's last one."""
        left = self._open.get(lease, 0) - 1
        if left < 0:
            return False
        self.puts -= 1
        if left:
            self._open[lease] = left
            return False
        del self._open[lease]
        return True

    def clear(self) -> None:
        """All is over: the store, or this life of ours, is."""
        self._open.clear()
        self.puts = 0

    def requests(self) -> tuple[RequestRef, ...]:
        """The full list for the store."""
        return tuple(RequestRef(lease.request, lease.attempt) for lease in self._open)
