"""An engine with nothing to do lets its loads run."""

import threading
from typing import Any

import torch

from kvtide.connect.page_mover import Finished, PageMover
from kvtide.connect.pages import Pages
from kvtide.connect.prefix_plan import Claim, Move, Task

FOR_EVER_S = 3600.0
TASK = Task("a", Claim(), (Move(0, (1, 2), (b"one", b"two")),))


class Pool:
    """A client and a space book: answers a load, with nothing, once it is let."""

    def __init__(self) -> None:
        self.let = threading.Event()

    def space(self, _group: int, _claim: Claim) -> "Pool":
        return self

    def keys(self, names: tuple[bytes, ...]) -> tuple[bytes, ...]:
        return names

    def load(self, _space: object, keys: tuple[bytes, ...], _deliver: object) -> Any:
        assert self.let.wait(FOR_EVER_S)
        return (False,) * len(keys)


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
    assert mover.finished() == Finished({"a"}, {"a"}, {1, 2})
    ends.join()
    mover.close()


def test_a_pause_without_a_load_is_over_in_its_time() -> None:
    mover = mover_of(Pool())
    assert not mover.loading
    mover.pause(0.001)
    assert mover.finished() == Finished()
    mover.close()
