"""Which request was placed where, by whichever conductor.

A booking is load of its workers until they report (see ``ConductorLimits``), and the
memory of the request's newest attempt until it ends.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvtide.conductor.limits import ConductorLimits
from kvtide.conductor.reducers.ledger import Ledger
from kvtide.kv import NodeId, NodeRef, RequestId

_MICROS = 1000
"""Work is counted in whole microseconds, so that no rounding is left behind."""


@dataclass(frozen=True, slots=True)
class Booking:
    """One placement: how long prefill will work, and what decode keeps room for.

    ``fill_tokens`` are those of the prompt that decode is to compute itself.
    """

    request: RequestId
    attempt: int
    conductor: NodeRef
    gateway: NodeRef
    prefill: NodeId | None
    decode: NodeId
    prefill_ms: float
    reserved_tokens: int
    at_s: float
    fill_tokens: int = 0


class Bookings:
    """One booking a request: that of its newest attempt. Bounded in number and age."""

    def __init__(self, limits: ConductorLimits) -> None:
        """Start with an empty book."""
        self._limits = limits
        self._booked: OrderedDict[RequestId, Booking] = OrderedDict()
        self._ended: OrderedDict[RequestId, float] = OrderedDict()
        self._by_gateway: dict[NodeRef, set[RequestId]] = {}
        self._listeners: list[Callable[[NodeId], None]] = []
        self._prefill = Ledger(self._changed)
        self._decode = Ledger(self._changed)
        self._fills = Ledger(self._changed)

    def __len__(self) -> int:
        """Requests in the book."""
        return len(self._booked)

    def get(self, request: RequestId) -> Booking | None:
        """The booking of a request's newest attempt."""
        return self._booked.get(request)

    def has_ended(self, request: RequestId) -> bool:
        """Whether this request is known to have had its terminal answer."""
        return request in self._ended

    def book(self, booking: Booking) -> bool:
        """Enter a placement, in place of the request's earlier one.

        False, and nothing happens, for a request that has ended or whose newer attempt
        is in the book.
        """
        request = booking.request
        known = self._booked.get(request)
        if request in self._ended:
            return False
        if known is not None and known.attempt > booking.attempt:
            return False
        self._remove(request)
        self._booked[request] = booking
        self._by_gateway.setdefault(booking.gateway, set()).add(request)
        now_s = booking.at_s
        if booking.prefill is not None:
            micros = round(max(0.0, booking.prefill_ms) * _MICROS)
            self._prefill.add(booking.prefill, request, micros, now_s)
        self._decode.add(booking.decode, request, booking.reserved_tokens, now_s)
        if booking.fill_tokens > 0:
            self._fills.add(booking.decode, request, booking.fill_tokens, now_s)
        while len(self._booked) > self._limits.bookings:
            self._remove(next(iter(self._booked)))
        return True

    def end(self, request: RequestId, now_s: float) -> Booking | None:
        """The request has ended: out of the book, and known as ended for a while."""
        self._ended[request] = now_s
        self._ended.move_to_end(request)
        while len(self._ended) > self._limits.ended:
            self._ended.popitem(last=False)
        return self._remove(request)

    def release(self, request: RequestId) -> Booking | None:
        """Take a booking out of the book: the request is about to be placed anew."""
        return self._remove(request)

    def reported(self, node: NodeId, now_s: float) -> None:
        """A worker's own figures have come: they contain what it had been sent."""
        before_s = now_s - self._limits.settle_s
        self._prefill.settle(node, before_s)
        self._decode.settle(node, before_s)
        self._fills.settle(node, before_s)

    def gateway_gone(self, gateway: NodeRef) -> list[RequestId]:
        """Nobody owns this gateway's requests any more; workers drop them too.

        Returns those that were in the book.
        """
        over = sorted(self._by_gateway.get(gateway, ()))
        for request in over:
            self._remove(request)
        return over

    def gateways(self) -> tuple[NodeRef, ...]:
        """The lives of gateways that own requests in the book."""
        return tuple(self._by_gateway)

    def gateway_idle(self, gateway: NodeRef, now_s: float) -> list[RequestId]:
        """This gateway has no open request: what was booked for it earlier has ended.

        So the loss of a ``RequestEnded`` is made good, and so is a placement that was
        heard after its gateway's end. Returns what was in the book.
        """
        before_s = now_s - self._limits.idle_s
        owned = sorted(self._by_gateway.get(gateway, ()))
        over = [name for name in owned if self._booked[name].at_s <= before_s]
        for request in over:
            self._remove(request)
        return over

    def tick(self, now_s: float) -> None:
        """Time has passed: let go of what is too old."""
        self._prefill.settle_all(now_s - self._limits.unreported_s)
        self._decode.settle_all(now_s - self._limits.unreported_s)
        self._fills.settle_all(now_s - self._limits.unreported_s)
        while self._booked:
            oldest = next(iter(self._booked.values()))
            if now_s - oldest.at_s <= self._limits.booking_s:
                break
            self._remove(oldest.request)
        while self._ended:
            request, ended_s = next(iter(self._ended.items()))
            if now_s - ended_s <= self._limits.ended_s:
                break
            del self._ended[request]

    def on_change(self, listener: Callable[[NodeId], None]) -> None:
        """Tell ``listener`` of each node whose booked load changes."""
        self._listeners.append(listener)

    def prefill_ms(self, node: NodeId) -> float:
        """Work that this node will have, beyond what it reports."""
        return self._prefill.tokens(node) / _MICROS

    def decode_tokens(self, node: NodeId) -> int:
        """Tokens of KV that this node will keep, beyond what it reports."""
        return self._decode.tokens(node)

    def fill_tokens(self, node: NodeId) -> int:
        """Tokens of prompts that this decode worker will compute, beyond its report."""
        return self._fills.tokens(node)

    def decode_requests(self, node: NodeId) -> int:
        """Requests that this node will have, beyond what it reports."""
        return self._decode.requests(node)

    def clear(self) -> None:
        """Forget all bookings; which requests have ended stays known."""
        self._booked.clear()
        self._by_gateway.clear()
        self._prefill.clear()
        self._decode.clear()
        self._fills.clear()

    def _changed(self, node: NodeId) -> None:
        for listener in self._listeners:
            listener(node)

    def _remove(self, request: RequestId) -> Booking | None:
        booking = self._booked.pop(request, None)
        if booking is None:
            return None
        if booking.prefill is not None:
            self._prefill.remove(booking.prefill, request)
        self._decode.remove(booking.decode, request)
        if booking.fill_tokens > 0:
            self._fills.remove(booking.decode, request)
        owned = self._by_gateway[booking.gateway]
        owned.discard(request)
        if not owned:
            del self._by_gateway[booking.gateway]
        return booking
