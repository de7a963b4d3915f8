"""Bytes for parsers: anything at all, and what was right until somebody changed it."""

import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

MOST_BYTES = 32 << 20
"""What reading a few kilobytes may take: no length in them is believed."""

LONG = 100
LONG_MARKS = (pytest.mark.full, pytest.mark.timeout(900))
ROUNDS = [
    pytest.param(25, id="short"),
    pytest.param(1500, id="long", marks=LONG_MARKS),
]


@dataclass(frozen=True, slots=True)
class Target:
    """A parser: what it is fed, and the errors that it may raise.

    ``good`` are inputs that it takes; what is tried is made of them, too.
    """

    name: str
    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    good: tuple[bytes, ...] = ()


def pieces(good: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Any bytes, and good ones that were cut, grown, or changed in a few places."""
    anything = st.binary(max_size=300)
    if not good:
        return anything

    @st.composite
    def changed(draw: st.DrawFn) -> bytes:
        data = bytearray(draw(st.sampled_from(good)))
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, max(0, len(data) - 1)))
            match draw(st.integers(0, 4)):
                case 0:
                    data[at : at + 1] = draw(st.binary(max_size=9))
                case 1:
                    del data[at : at + draw(st.integers(1, 40))]
                case 2:
                    data[at:at] = data[: draw(st.integers(0, 60))]
                case 3:
                    data[at : at + 8] = b"\xff" * draw(st.sampled_from([1, 4, 8]))
                case _:
                    data[at : at + 4] = draw(st.sampled_from(NUMBERS))
        return bytes(data[:70_000])

    return st.one_of(anything, changed())


NUMBERS = [b"\xff\xff\xff\x7f", b"nan ", b"-inf", b"1e99", b"\x00\x00\x00\x80", b"[[[["]


def fuzz(target: Target, rounds: int) -> None:
    """Feed it; what it raises is its own, and it takes no memory that it is told to."""

    @settings(
        max_examples=rounds,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        database=None,
        derandomize=rounds < LONG,
    )
    @given(pieces(target.good))
    def feed(data: bytes) -> None:
        with suppress(*target.errors):
            target.read(data)

    for data in target.good:
        target.read(data)
    if rounds < LONG:
        feed()
        return
    tracemalloc.start()
    try:
        feed()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES
