"""Whose turn it is: work is done once, by whoever is there, and never forgotten."""

import threading
from collections import deque
from collections.abc import Iterator

import pytest

from kvtide.transfer.driver import Driver

LIMIT_S = 20.0


class Desk:
    """Work that is done by noting which thread did it."""

    def __init__(self) -> None:
        self.waiting: deque[int] = deque()
        self.done: list[tuple[int, str]] = []
        self.changed = threading.Condition()
        self.left = 0
        self.driver = Driver("own", self._busy, self.work, self._leave)

    def put(self, number: int, *, at_once: bool) -> None:
        self.waiting.append(number)
        self.driver.nudge(at_once=at_once)

    def work(self) -> None:
        while self.waiting:
            with self.changed:
                name = threading.current_thread().name
                self.done.append((self.waiting.popleft(), name))
                self.changed.notify_all()

    def wait_done(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.done) >= count, LIMIT_S)

    def _busy(self) -> bool:
        return bool(self.waiting)

    def _leave(self) -> None:
        self.left += 1


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.driver.close()
    desk.driver.join()


@pytest.mark.parametrize("at_once", [True, False])
def test_what_nobody_does_is_done(desk: Desk, *, at_once: bool) -> None:
    for number in range(200):
        desk.put(number, at_once=at_once)
        if number % 7 == 0:
            desk.wait_done(number + 1)
    desk.wait_done(200)
    assert [number for number, _ in desk.done] == list(range(200))
    assert {name for _, name in desk.done} == {"own"}


def test_who_waits_does_it(desk: Desk) -> None:
    desk.waiting.append(1)
    desk.driver.share(desk.work)
    assert desk.done == [(1, threading.current_thread().name)]


def test_what_is_left_over_is_done_too(desk: Desk) -> None:
    desk.put(1, at_once=True)
    desk.wait_done(1)
    desk.waiting.append(2)
    desk.driver.share(lambda: None)
    desk.wait_done(2)


def test_many_at_a_time(desk: Desk) -> None:
    def submit(start: int) -> None:
        for number in range(start, start + 100):
            desk.put(number, at_once=number % 3 == 0)
            if number % 2:
                desk.driver.share(desk.work)

    threads = [threading.Thread(target=submit, args=(at * 100,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    desk.wait_done(800)
    assert sorted(number for number, _ in desk.done) == list(range(800))


def test_the_end_comes_once(desk: Desk) -> None:
    desk.put(1, at_once=True)
    desk.wait_done(1)
    desk.driver.close()
    desk.driver.join()
    assert desk.left == 1


def test_an_end_without_a_beginning(desk: Desk) -> None:
    desk.driver.close()
    desk.driver.join()
    assert desk.left == 0
