"""Connections that were given up: named by later writes, left before those are taken."""

import threading

import pytest

from kvtide.transfer import TimedOut
from kvtide.transfer.fence import GivenUp, Shut
from kvtide.transfer.wire import MOST_LANES, Ask, FrameError, pack_ask, unpack_ask

ONE, OTHER = b"1" * 16, b"2" * 16


def test_a_lane_is_named_until_the_owner_has_left_it() -> None:
    given_up = GivenUp()
    given_up.add(ONE)
    named = given_up.lanes()
    given_up.add(OTHER)
    given_up.left(named)
    assert given_up.lanes() == (OTHER,)


def test_the_names_are_bounded() -> None:
    given_up = GivenUp()
    for number in range(MOST_LANES + 5):
        given_up.add(number.to_bytes(16))
    assert len(given_up.lanes()) == MOST_LANES


def test_shutting_waits_until_the_thread_has_left() -> None:
    shut, ended = Shut(), threading.Event()
    assert shut.enter(ONE, ended.set)
    steps: list[str] = []

    def serve() -> None:
        ended.wait(20)
        steps.append("left")
        shut.leave(ONE)

    thread = threading.Thread(target=serve)
    thread.start()
    shut.shut([ONE], 20)
    steps.append("shut")
    thread.join()
    assert steps == ["left", "shut"]


def test_a_thread_that_does_not_leave_is_an_error() -> None:
    shut = Shut()
    assert shut.enter(ONE, lambda: None)
    with pytest.raises(TimedOut):
        shut.shut([OTHER, ONE], 0.01)


def test_a_thread_that_comes_late_is_turned_away() -> None:
    shut = Shut()
    shut.shut([ONE])
    assert not shut.enter(ONE, lambda: None)
    assert shut.enter(OTHER, lambda: None)


def test_lanes_go_with_a_request() -> None:
    ask = Ask([(1, bytes(25))], [(0, 8, 4)], "reuse", "trace", (ONE, OTHER))
    assert unpack_ask(pack_ask(ask)) == ask
    with pytest.raises(FrameError):
        unpack_ask(pack_ask(ask._replace(lanes=[ONE] * (MOST_LANES + 1))))
