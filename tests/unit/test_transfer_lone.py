"""The few steps for one slice say the same, and do the same, as all the steps."""

import socket
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from kvtide.transfer.channel import Channel
from kvtide.transfer.handles import ReadSlice, RegionHandle
from kvtide.transfer.lone import is_plain
from kvtide.transfer.schedule import DEPTH, Rail, Schedule
from kvtide.transfer.wire import (
    Ask,
    Kind,
    ask_start,
    pack,
    pack_ask,
    pack_good,
    pack_read,
    split_ask,
)

KEY = bytes(range(32))
HANDLE = RegionHandle("a", 7, 3, 1000, bytes(25), "")
NUMBER = st.integers(0, 2**64 - 1)


def never() -> None:
    pytest.fail("asked to give up")


@given(NUMBER, NUMBER, NUMBER, st.binary(min_size=25, max_size=25), st.text())
def test_a_frame_for_one_piece_is_that_of_all_requests(
    region: int, offset: int, length: int, capability: bytes, purpose: str
) -> None:
    body = pack_ask(Ask([(region, capability)], [(0, offset, length)], purpose))
    start = ask_start(region, capability, purpose)
    assert pack_read(KEY, 5, start, offset, length) == pack(KEY, Kind.READ, 5, body)
    assert split_ask(body) == (start, 0, offset, length)


@given(NUMBER)
def test_that_all_is_well_is_an_answer_without_a_body(request_id: int) -> None:
    assert pack_good(KEY, request_id) == pack(KEY, Kind.ANSWER, request_id, b"")


@pytest.mark.parametrize("offset", [0, 900])
def test_a_slice_without_faults_is_plain(offset: int) -> None:
    view = memoryview(bytearray(100))
    assert is_plain(ReadSlice(HANDLE, offset, view), "a", 7)


@pytest.mark.parametrize(
    "place",
    [
        ReadSlice(HANDLE, -1, memoryview(bytearray(100))),
        ReadSlice(HANDLE, 901, memoryview(bytearray(100))),
        ReadSlice(HANDLE, 0, memoryview(b"")),
        ReadSlice(HANDLE, 0, memoryview(bytearray(100))[::2]),
        ReadSlice(HANDLE, 0, memoryview(bytearray(100)).cast("I")),
        ReadSlice(HANDLE, 0, memoryview(bytearray(100)).cast("B", (10, 10))),
        ReadSlice(replace(HANDLE, node="b"), 0, memoryview(bytearray(100))),
        ReadSlice(replace(HANDLE, epoch=8), 0, memoryview(bytearray(100))),
        ReadSlice(replace(HANDLE, region=-1), 0, memoryview(bytearray(100))),
        ReadSlice(replace(HANDLE, capability=b"1"), 0, memoryview(bytearray(100))),
        ReadSlice(HANDLE, True, memoryview(bytearray(100))),
    ],
)
def test_what_needs_a_word_is_not_plain(place: ReadSlice) -> None:
    assert not is_plain(place, "a", 7)


@given(
    st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=6),
    st.integers(1, 200),
    st.integers(0, 100),
)
def test_bytes_that_were_taken_ahead_come_first_and_once(
    parts: list[bytes], most: int, used: int
) -> None:
    """However what was given back, and what the socket still has, are taken."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    sent = b"".join(parts)
    theirs.sendall(sent)
    data = channel.receive_ahead(most, never)
    used = min(used, len(data))
    channel.put_back(data[used:])
    got = bytearray(len(sent) - used)
    view = memoryview(got)
    first = min(3, len(got))
    view[:first] = channel.receive(first, never)
    rest = [piece for piece in (view[first:200], view[200:]) if len(piece)]
    if len(got) > first:
        channel.receive_into(rest, never)
    assert bytes(got) == sent[used:]
    channel.close()
    theirs.close()


def test_at_once_goes_what_has_not_to_wait() -> None:
    schedule: Schedule[_Load] = Schedule([Rail("a", measured=True)])
    taken = [schedule.assign_at_once(100, 0, 1.0) for _ in range(DEPTH)]
    assert taken == [0] * DEPTH
    assert schedule.assign_at_once(100, 0, 1.0) is None
    assert schedule.rails[0].in_flight_bytes == DEPTH * 100
    schedule.put(_Load())
    schedule.finished(0, 100, 2.0)
    # another was there before
    assert schedule.assign_at_once(100, 0, 2.0) is None


def test_at_once_goes_nothing_where_a_rail_has_failed() -> None:
    schedule: Schedule[_Load] = Schedule([Rail("a", measured=True), Rail("b")])
    assert schedule.assign_at_once(100, 0, 1.0) == 0
    schedule.failed(0, 100, 1.0)
    assert schedule.assign_at_once(100, 0, 1.0) is None


class _Load:
    nbytes = 100
    urgency = 0
    location = ""
    least_tier = 0
