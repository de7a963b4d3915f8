"""An engine with nothing to do lets its loads run."""

import threading
from typing import Any

import torch

from kvtide.connect.page_mover import Finished, PageMover
from kvtide.connect.pages import Pages
from kvtide.connect.prefix_plan import Claim, Move, Task

FOR_EVER_S = 3600.0
MOVE = Move(0, (1, 2), (b"one", b"two"))
TASK = Task("a", Claim(), (MOVE,))


class Pool:
    """A client and a space book: a load takes three quarters of its limit, once it is let."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.limits: list[float] = []

    def space(self, _group: int, _claim: Claim) -> "Pool":
        return self

    def keys(self, names: tuple[bytes, ...]) -> tuple[bytes, ...]:
        return names

    load_limit_s = save_limit_s = 1.0
    now = 0.0

    def now_s(self) -> float:
        return self.now

    def load(
        self,
        _space: object,
        keys: tuple[bytes, ...],
        _deliver: object,
        *,
        limit_s: float,
    ) -> Any:
        assert self.let.wait(FOR_EVER_S)
        self.limits.append(limit_s)
        self.now += 0.75
        return (True,) * len(keys)

    def save(
        self,
        _space: object,
        _keys: tuple[bytes, ...],
        _supply: object,
        *,
        limit_s: float,
    ) -> int:
        self.limits.append(limit_s)
        self.now += 0.75
        return 0


def mover_of(pool: Any) -> PageMover:
    return PageMover(pool, [Pages([torch.zeros(4, 32)], torch.uint8)], pool)


def test_a_pause_ends_with_the_load() -> None:
    pool = Pool()
    mover = mover_of(pool)
    mover.load(TASK)
    assert mover.loading
    mover.pause(0.001)
    assert mover.finished() == Finished()
    ends = threading.Timer(0.02, pool.let.set)
    ends.start()
    mover.pause(FOR_EVER_S)
    assert not mover.loading
    # it is over already: nothing is waited for
    mover.pause(FOR_EVER_S)
    assert mover.finished() == Finished({"a"})
    ends.join()
    mover.close()


def test_a_pause_without_a_load_is_over_in_its_time() -> None:
    mover = mover_of(Pool())
    assert not mover.loading
    mover.pause(0.001)
    assert mover.finished() == Finished()
    mover.close()


def test_a_loads_limit_is_that_of_all_its_moves_and_of_its_wait() -> None:
    pool = Pool()
    pool.let.set()
    mover = mover_of(pool)
    later = [Move(0, (block,), (b"more",)) for block in (3, 4)]
    mover.load(Task("a", Claim(), (MOVE, *later)))
    mover.close()
    # the third had no time left
    assert pool.limits == [1.0, 0.25]
    assert mover.finished() == Finished({"a"}, {"a"}, {4})


def test_a_load_waits_behind_others_within_its_limit() -> None:
    pool = Pool()
    mover = mover_of(pool)
    names = ("a", "b", "c")
    for name in names:
        mover.load(Task(name, Claim(), (MOVE,)))
    pool.let.set()
    while mover.loading:
        mover.pause(0.01)
    mover.close()
    assert pool.limits == [1.0, 0.25]
    assert mover.finished() == Finished(set(names), {"c"}, {1, 2})


def test_a_steps_saves_have_one_limit_whoever_they_are_for() -> None:
    pool = Pool()
    mover = mover_of(pool)
    mover.save([Task(name, Claim(name), (MOVE,)) for name in ("a", "b", "c")])
    assert pool.limits == [1.0, 0.25]
    mover.close()
