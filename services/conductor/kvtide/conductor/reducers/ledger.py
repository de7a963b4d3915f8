"""Load that was promised to a node and that its own reports don't contain yet.

In tokens, or whatever else is counted in whole numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvtide.kv import NodeId, RequestId


@dataclass(frozen=True, slots=True)
class _Entry:
    tokens: int
    at_s: float


class _Account:
    """The open entries of one node. ``tokens`` is their sum, never negative."""

    __slots__ = ("entries", "tokens")

    def __init__(self) -> None:
        self.entries: dict[RequestId, _Entry] = {}
        self.tokens = 0

    def remove(self, request: RequestId) -> None:
        entry = self.entries.pop(request, None)
        if entry is not None:
            self.tokens -= entry.tokens


class Ledger:
    """Tokens by node and request, until reported, removed or too old."""

    def __init__(self, changed: Callable[[NodeId], None] = lambda _: None) -> None:
        """Start empty; ``changed`` is told of every node whose sums change."""
        self._changed = changed
        self._accounts: dict[NodeId, _Account] = {}

    def add(self, node: NodeId, request: RequestId, tokens: int, now_s: float) -> None:
        """Promise ``tokens``; replaces what was promised for this request there."""
        account = self._accounts.setdefault(node, _Account())
        account.remove(request)
        account.entries[request] = _Entry(tokens, now_s)
        account.tokens += tokens
        self._changed(node)

    def remove(self, node: NodeId, request: RequestId) -> None:
        """The request is no load of this node (any more)."""
        account = self._accounts.get(node)
        if account is not None:
            account.remove(request)
            self._close(node, account)

    def settle(self, node: NodeId, before_s: float) -> None:
        """The node's own figures contain all that was promised before ``before_s``."""
        account = self._accounts.get(node)
        if account is None:
            return
        for request, entry in tuple(account.entries.items()):
            if entry.at_s > before_s:
                break
            account.remove(request)
        self._close(node, account)

    def settle_all(self, before_s: float) -> None:
        """What was promised before ``before_s`` and never reported has not come."""
        for node in tuple(self._accounts):
            self.settle(node, before_s)

    def tokens(self, node: NodeId) -> int:
        """Promised to this node in all."""
        account = self._accounts.get(node)
        return account.tokens if account is not None else 0

    def requests(self, node: NodeId) -> int:
        """Requests promised to this node."""
        account = self._accounts.get(node)
        return len(account.entries) if account is not None else 0

    def clear(self) -> None:
        """Forget all promises."""
        nodes = tuple(self._accounts)
        self._accounts.clear()
        for node in nodes:
            self._changed(node)

    def _close(self, node: NodeId, account: _Account) -> None:
        if not account.entries:
            del self._accounts[node]
        self._changed(node)
