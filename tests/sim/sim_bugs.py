# pyright: reportPrivateUsage=false
"""Bugs, planted into production code. A checker that misses one of them is broken.

Each is a mutation of one decision (two where a second line of defence would hide the
first), undone at the end of its ``with``.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import PropertyMock, patch

import msgspec

import kvtide.sim.pool
from kvtide.bus.following import Apply, BlockFollowing, FollowCommand
from kvtide.bus.messages import BlocksChanged, FinishReason, TokenPage, Tokens
from kvtide.bus.ownership import Ownership
from kvtide.conductor.reducers.bookings import Booking, Bookings
from kvtide.conductor.reducers.prefix_index import PrefixIndex
from kvtide.decode.arrival import Arrival
from kvtide.decode.pages import PageLedger
from kvtide.gateway.life import Life, answer
from kvtide.gateway.life.letters import Letters
from kvtide.gateway.life.token_flow import Taken, TokenFlow
from kvtide.kv import BlockHeader, RequestId, RequestRef
from kvtide.pool.ledger import Ledger
from kvtide.store.inventory import Inventory
from kvtide.store.machine import StoreMachine

Bug = Callable[[], AbstractContextManager[Any]]


def _replaced(target: object, name: str, by: Any) -> Bug:
    return lambda: patch.object(target, name, by)


def _both(*bugs: Bug) -> Bug:
    @contextmanager
    def planted() -> Any:
        with ExitStack() as stack:
            for bug in bugs:
                stack.enter_context(bug())
            yield

    return planted


def _nothing(*_: object, **__: object) -> None:
    return None


def _no_list(*_: object, **__: object) -> list[Any]:
    return []


def _never(*_: object) -> bool:
    return False


# ---- the gateway


class RepeatingFlow(TokenFlow):
    """Takes every token event for a new one."""

    def _take(
        self, said: Tokens | TokenPage, finish: FinishReason | None, now_s: float
    ) -> Taken:
        again = msgspec.structs.replace(said, index=self.have)
        return super()._take(again, finish, now_s)


class JumpingFlow(TokenFlow):
    """Does not see a gap."""

    def _take(
        self, said: Tokens | TokenPage, finish: FinishReason | None, now_s: float
    ) -> Taken:
        self.have = max(self.have, said.index)
        return super()._take(said, finish, now_s)


_life_end = Life._end


def _end_again(self: Life, *rest: Any) -> Any:
    commands = _life_end(self, *rest)
    self._answered = False
    return commands


_letters_decode = Letters.decode


def _decode_anew(self: Letters, placed: Any, received: Any, left_ms: float) -> Any:
    """What the client has counts as prompt: the next worker begins to count anew."""
    work = _letters_decode(self, placed, received, left_ms)
    return msgspec.structs.replace(work, prompt_tokens=len(work.tokens))


# ---- workers


def _deaf_to_cancels(self: Ownership, ref: RequestRef, now_s: float) -> None:
    return None


_pop_pages = PageLedger.release


def _leak_page(self: PageLedger, ref: RequestRef) -> None:
    _pop_pages(self, ref)
    self._used += 1


_copies_read = Arrival.copies_read


def _believe_misses(self: Arrival, read: Iterable[int], missed: Iterable[int]) -> None:
    _copies_read(self, (*read, *missed), ())


# ---- the conductor


def _never_ends(self: Bookings, request: RequestId, now_s: float) -> Booking | None:
    return self.get(request)


# ---- the pool


def _any_header(raw: bytes, *_: object) -> BlockHeader:
    return BlockHeader.decode(raw)


def _evict_halfway(self: Inventory, slot: int, reason: str, now_s: float) -> None:
    self.table.evicting(slot)
    self.drop(slot, reason, now_s)


# ---- what is known of blocks


def _follow_blindly(
    self: BlockFollowing, change: BlocksChanged, now_s: float
) -> list[FollowCommand]:
    """Applies what comes, whatever did not come before it."""
    store = self._stores.get(change.store.node)
    if store is None or store.snapshot is not None or change.seq < store.next_seq:
        return _changed(self, change, now_s)
    store.next_seq = change.seq + 1
    return [Apply(store.ref, change.added, change.dropped)]


_changed = BlockFollowing.changed

BUGS: dict[str, Bug] = {
    "an answer is ended twice": _replaced(Life, "_end", _end_again),
    "tokens are taken twice": _replaced(answer, "TokenFlow", RepeatingFlow),
    "a gap in the tokens is not seen": _replaced(answer, "TokenFlow", JumpingFlow),
    "a fail-over counts anew": _replaced(Letters, "decode", _decode_anew),
    "timers are never set": lambda: patch.object(
        Life, "wake_s", PropertyMock(return_value=float("inf"))
    ),
    "cancels are lost": _both(
        _replaced(Ownership, "cancel", _deaf_to_cancels),
        _replaced(Ownership, "listed", _no_list),
    ),
    "a page leaks": _replaced(PageLedger, "release", _leak_page),
    "a miss counts as read": _replaced(Arrival, "copies_read", _believe_misses),
    "a stale generation is accepted": _replaced(
        kvtide.sim.pool, "checked_header", _any_header
    ),
    "a checksum is not checked": _replaced(kvtide.sim.pool, "check_parts", _nothing),
    "a booking never ends": _both(
        _replaced(Bookings, "end", _never_ends),
        _replaced(Bookings, "gateway_idle", _no_list),
    ),
    "bookings outlive their gateway": _both(
        _replaced(Bookings, "gateway_gone", _no_list),
        _replaced(Bookings, "gateway_idle", _no_list),
    ),
    "a lease never ends": _replaced(StoreMachine, "_end", _nothing),
    "a lease is not closed": _replaced(Ledger, "close", _never),
    "the dead keep their leases": _replaced(StoreMachine, "_end_life", _nothing),
    "an evicted slot is lost": _replaced(Inventory, "evict", _evict_halfway),
    "gossip is followed past gaps": _replaced(
        BlockFollowing, "changed", _follow_blindly
    ),
    "dropped blocks stay in the index": _replaced(PrefixIndex, "_drop", _nothing),
    "blocks of dead stores stay in the index": _both(
        _replaced(PrefixIndex, "forget", _nothing),
        _replaced(PrefixIndex, "forget_life", _nothing),
    ),
}
