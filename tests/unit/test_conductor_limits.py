"""Tenants' limits: granted once, given back, expired, never beyond what is allowed."""

from hypothesis import given, settings, strategies as st

from kvtide.conductor.quota import TenantQuota
from kvtide.conductor.reducers.limits import TenantLimits
from kvtide.kv import RequestId, TenantId

T = TenantId("t")


def limits(**quota: float) -> TenantLimits:
    return TenantLimits({T: TenantQuota(**quota)})  # pyright: ignore[reportArgumentType]


def name(number: int) -> RequestId:
    return RequestId(f"r{number}")


def test_a_request_is_charged_once_however_often_it_asks() -> None:
    book = limits(requests_per_min=1)
    assert book.grant(T, name(1), 10, 0.0) is None
    assert book.grant(T, name(1), 10, 1.0) is None
    denied = book.grant(T, name(2), 10, 1.0)
    assert denied is not None
    assert denied.retry_after_ms is not None
    # the time that it names is enough
    assert book.grant(T, name(2), 10, 1.0 + denied.retry_after_ms / 1000) is None


def test_tokens_that_were_not_used_are_given_back() -> None:
    book = limits(tokens_per_min=1000)
    assert book.grant(T, name(1), 900, 0.0) is None
    assert book.grant(T, name(2), 200, 0.0) is not None
    book.ended(name(1), 100, 0.0)
    assert book.grant(T, name(2), 900, 0.0) is None


def test_what_never_fits_is_told_so() -> None:
    denied = limits(tokens_per_min=1000).grant(T, name(1), 1001, 0.0)
    assert denied is not None
    assert denied.retry_after_ms is None
    assert "1001" in denied.reason


def test_open_requests_are_limited_and_expire() -> None:
    book = limits(concurrent_requests=2)
    assert book.grant(T, name(1), 1, 0.0) is None
    assert book.grant(T, name(2), 1, 0.0) is None
    assert book.grant(T, name(3), 1, 0.0) is not None
    book.tick(901.0)
    assert book.open_requests(T) == 0
    assert book.grant(T, name(3), 1, 901.0) is None


def test_a_refused_placement_costs_nothing() -> None:
    book = limits(requests_per_min=1, tokens_per_min=10, concurrent_requests=1)
    for number in range(5):
        assert book.grant(T, name(number), 10, 0.0) is None
        book.release(name(number), 0.0)


def test_who_takes_over_as_home_knows_what_was_used() -> None:
    book = limits(requests_per_min=2)
    book.heard(T, name(1), 5, 0.0)
    book.heard(T, name(1), 5, 0.0)
    assert book.grant(T, name(2), 5, 0.0) is None
    assert book.grant(T, name(3), 5, 0.0) is not None


def test_new_quotas_keep_what_was_used() -> None:
    book = limits(requests_per_min=10)
    for number in range(4):
        assert book.grant(T, name(number), 1, 0.0) is None
    book.replace({T: TenantQuota(requests_per_min=4)})
    assert book.grant(T, name(9), 1, 0.0) is not None
    book.replace({})
    assert book.grant(T, name(9), 1, 0.0) is None


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["grant", "heard", "release", "ended", "tick"]),
            st.integers(0, 6),
            st.integers(0, 60),
            st.floats(0, 30),
        ),
        max_size=60,
    )
)
def test_any_story_stays_within_the_quota(
    story: list[tuple[str, int, int, float]],
) -> None:
    quota = TenantQuota(requests_per_min=30, tokens_per_min=200, concurrent_requests=3)
    book = TenantLimits({T: quota}, grant_s=100)
    now_s, granted = 0.0, 0
    for what, number, tokens, passed_s in story:
        now_s += passed_s
        match what:
            case "grant":
                new = len(book)
                if book.grant(T, name(number), tokens, now_s) is None:
                    granted += len(book) - new
                    assert book.open_requests(T) <= max(3, len(book))
            case "heard":
                book.heard(T, name(number), tokens, now_s)
            case "release":
                book.release(name(number), now_s)
            case "ended":
                book.ended(name(number), tokens, now_s)
            case _:
                book.tick(now_s)
        assert book.open_requests(T) == len(book)
        assert len(book) <= 7
    # a burst of a minute's worth, and then the rate
    assert granted <= 7 + 30 + now_s / 60 * 30 + 1
