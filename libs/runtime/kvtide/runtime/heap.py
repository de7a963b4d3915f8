"""Keeps the garbage collector's pauses short in a process that serves."""

import gc

YOUNG_OBJECTS = 10_000
"""New objects before the youngest are looked at: a request makes some hundreds."""
TURNS = 20
"""Collections of one generation before the next older one is looked at."""


def settle_heap() -> None:
    """Leave all that is alive now out of every later collection.

    For a process that has built up what it stands on: modules, routes and tables are
    hundreds of thousands of objects that stay, and a collection of the oldest generation
    walks them all while every request waits. What is left out is still freed when
    nothing refers to it, unless it is part of a cycle. May be called again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, TURNS, TURNS)
