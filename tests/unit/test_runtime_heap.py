"""What a process stands on is not looked at again by the garbage collector."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from kvtide.runtime.heap import settle_heap


class Node:
    """Something that can be part of a cycle."""

    def __init__(self) -> None:
        self.other: Node | None = None


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """As it was, afterwards."""
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_what_lives_is_left_out_and_what_comes_later_is_not() -> None:
    old = Node()
    settle_heap()
    assert gc.get_freeze_count() > 0
    assert all(found is not old for found in gc.get_objects())
    cycle = Node()
    cycle.other = cycle
    gone = weakref.ref(cycle)
    del cycle
    gc.collect()
    assert gone() is None


def test_what_was_left_out_is_freed_when_nothing_refers_to_it() -> None:
    old = Node()
    gone = weakref.ref(old)
    settle_heap()
    del old
    assert gone() is None
