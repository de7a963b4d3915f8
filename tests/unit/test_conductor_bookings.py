"""Bookings: load that workers don't report yet, and the memory of what was placed."""

from dataclasses import replace

from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.unit.conductor_cluster import GATEWAY, ref

from kvtide.conductor.limits import ConductorLimits
from kvtide.conductor.reducers.bookings import Booking, Bookings
from kvtide.kv import NodeId, NodeRef, RequestId

LIMITS = ConductorLimits(
    settle_s=0.3, unreported_s=3, booking_s=100, bookings=8, ended_s=60, ended=5
)
P1, P2, D1 = NodeId("p1"), NodeId("p2"), NodeId("d1")
BOOKING = Booking(
    request=RequestId("r1"),
    attempt=0,
    conductor=ref("c1"),
    gateway=GATEWAY,
    prefill=P1,
    decode=D1,
    prefill_ms=100.0,
    reserved_tokens=150,
    at_s=1000.0,
)


def loads(book: Bookings) -> tuple[float, int, int]:
    return (
        book.prefill_ms(P1),
        book.decode_tokens(D1),
        book.decode_requests(D1),
    )


def test_a_booking_is_load_until_its_workers_report_it() -> None:
    book = Bookings(LIMITS)
    assert book.book(BOOKING)
    assert loads(book) == (100, 150, 1)
    book.reported(P1, 1000.1)
    assert loads(book) == (100, 150, 1)  # too early to contain it
    book.reported(P1, 1000.4)
    assert loads(book) == (0, 150, 1)
    book.reported(D1, 1000.4)
    assert loads(book) == (0, 0, 0)
    assert book.get(BOOKING.request) == BOOKING


def test_a_booking_that_is_never_reported_stops_being_load() -> None:
    book = Bookings(LIMITS)
    book.book(BOOKING)
    book.tick(1002.9)
    assert loads(book) == (100, 150, 1)
    book.tick(1003.1)
    assert loads(book) == (0, 0, 0)


def test_booking_twice_counts_once_and_a_new_attempt_replaces_the_old() -> None:
    book = Bookings(LIMITS)
    book.book(BOOKING)
    book.book(BOOKING)
    assert loads(book) == (100, 150, 1)
    assert book.book(replace(BOOKING, attempt=1, prefill=P2))
    assert (book.prefill_ms(P1), book.prefill_ms(P2)) == (0, 100)
    assert not book.book(BOOKING)
    assert (book.prefill_ms(P1), book.prefill_ms(P2)) == (0, 100)
    assert len(book) == 1


def test_an_end_frees_and_late_messages_of_it_do_nothing() -> None:
    book = Bookings(LIMITS)
    book.book(BOOKING)
    assert book.end(BOOKING.request, 1001.0) == BOOKING
    assert loads(book) == (0, 0, 0)
    assert not book.book(replace(BOOKING, attempt=5))
    assert book.end(BOOKING.request, 1002.0) is None
    book.tick(1061.9)
    assert book.has_ended(BOOKING.request)
    book.tick(1062.1)
    assert not book.has_ended(BOOKING.request)


def test_a_gateway_takes_its_requests_with_it() -> None:
    book = Bookings(LIMITS)
    other = NodeRef(NodeId("g2"), 1)
    book.book(BOOKING)
    book.book(replace(BOOKING, request=RequestId("r2"), gateway=other))
    book.gateway_gone(GATEWAY)
    assert loads(book) == (100, 150, 1)
    assert book.get(BOOKING.request) is None
    book.gateway_gone(other)
    assert (len(book), loads(book)) == (0, (0, 0, 0))


def test_an_unending_request_leaves_the_book_at_last() -> None:
    book = Bookings(LIMITS)
    book.book(BOOKING)
    book.tick(1100.0)
    assert len(book) == 1
    book.tick(1100.1)
    assert len(book) == 0


REQUESTS = st.integers(0, 14).map(lambda n: RequestId(f"r{n}"))
NODES = st.sampled_from([P1, P2, D1])


class BookAgainstSums(RuleBasedStateMachine):
    """Whatever happens, loads are sums of what is open, and nothing grows for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.book = Bookings(LIMITS)
        self.now_s = 1000.0

    @rule(
        request=REQUESTS,
        attempt=st.integers(0, 3),
        prefill=st.sampled_from([None, P1, P2]),
        gateway=st.sampled_from(["g1", "g2"]),
        tokens=st.integers(0, 1000),
    )
    def add(
        self,
        request: RequestId,
        attempt: int,
        prefill: NodeId | None,
        gateway: str,
        tokens: int,
    ) -> None:
        booking = replace(
            BOOKING,
            request=request,
            attempt=attempt,
            prefill=prefill,
            gateway=ref(gateway),
            prefill_ms=tokens,
            reserved_tokens=tokens + 1,
            at_s=self.now_s,
            fill_tokens=tokens if prefill is None else 0,
        )
        known = self.book.get(request)
        allowed = not self.book.has_ended(request) and (
            known is None or known.attempt <= attempt
        )
        assert self.book.book(booking) == allowed

    @rule(request=REQUESTS)
    def end(self, request: RequestId) -> None:
        self.book.end(request, self.now_s)

    @rule(request=REQUESTS)
    def release(self, request: RequestId) -> None:
        self.book.release(request)

    @rule(node=NODES)
    def report(self, node: NodeId) -> None:
        self.book.reported(node, self.now_s)

    @rule(gateway=st.sampled_from(["g1", "g2"]))
    def lose_gateway(self, gateway: str) -> None:
        self.book.gateway_gone(ref(gateway))

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 4.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.book.tick(self.now_s)

    @invariant()
    def accounts_are_bounded_and_never_negative(self) -> None:
        booked = [
            booking
            for number in range(15)
            if (booking := self.book.get(RequestId(f"r{number}"))) is not None
        ]
        assert len(booked) == len(self.book) <= LIMITS.bookings
        for node in (P1, P2):
            most = sum(b.prefill_ms for b in booked if b.prefill == node)
            assert 0 <= self.book.prefill_ms(node) <= most
        assert (
            0 <= self.book.decode_tokens(D1) <= sum(b.reserved_tokens for b in booked)
        )
        assert 0 <= self.book.decode_requests(D1) <= len(booked)
        assert 0 <= self.book.fill_tokens(D1) <= sum(b.fill_tokens for b in booked)

    def teardown(self) -> None:
        self.book.tick(self.now_s + 1000)
        assert len(self.book) == 0
        assert loads(self.book) == (0, 0, 0)
        assert self.book.fill_tokens(D1) == 0


TestBookAgainstSums = BookAgainstSums.TestCase
TestBookAgainstSums.settings = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
