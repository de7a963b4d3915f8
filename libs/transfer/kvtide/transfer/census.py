"""Which peer processes hold connections to us, and which are out of date. Pure."""

from kvtide.transfer.handshake import Verdict


class Census:
    """Counts connections by (node, epoch). Not thread-safe."""

    def __init__(self, most_connections: int) -> None:
        """Admit at most so many at a time."""
        self._most = most_connections
        self._total = 0
        self._newest: dict[str, int] = {}
        self._counts: dict[tuple[str, int], int] = {}

    def admit(self, node: str, epoch: int) -> Verdict:
        """Count a connection in, if it may."""
        if self._total >= self._most:
            return Verdict.TOO_MANY
        if epoch < self._newest.get(node, epoch):
            return Verdict.CLIENT_STALE
        self._newest[node] = epoch
        self._total += 1
        self._counts[node, epoch] = self._counts.get((node, epoch), 0) + 1
        return Verdict.WELCOME

    def leave(self, node: str, epoch: int) -> bool:
        """Count a connection out; whether it was the last of its process."""
        self._total -= 1
        left = self._counts[node, epoch] - 1
        if left:
            self._counts[node, epoch] = left
            return False
        del self._counts[node, epoch]
        return True

    def outdated(self, node: str, epoch: int) -> bool:
        """Whether a newer start of the node has been seen."""
        return epoch < self._newest.get(node, epoch)

    def __len__(self) -> int:
        """Connections now."""
        return self._total
