"""Virtual time: order, lives, pauses and promises."""

import pytest

from kvtide.sim import Kernel, Life, Promise, SimClock


def test_calls_happen_in_the_order_of_their_time_and_making() -> None:
    kernel, done = Kernel(start_s=0.0), list[tuple[str, float]]()
    for name, delay_s in (("late", 2.0), ("first", 1.0), ("second", 1.0)):
        kernel.at(delay_s, lambda name=name: done.append((name, kernel.now_s)))
    kernel.run(1.5)
    assert done == [("first", 1.0), ("second", 1.0)]
    assert kernel.now_s == 1.5
    kernel.run(1.0)
    assert done[-1] == ("late", 2.0)


def test_a_dead_life_does_nothing_more() -> None:
    kernel, life, done = Kernel(), Life("a"), list[str]()
    kernel.at(1.0, lambda: done.append("before"), life)
    kernel.at(3.0, lambda: done.append("after"), life)
    kernel.at(2.0, lambda: setattr(life, "alive", False))
    kernel.run(5.0)
    assert done == ["before"]


def test_a_paused_life_goes_on_later_in_order() -> None:
    kernel, life, done = Kernel(start_s=0.0), Life("a"), list[tuple[str, float]]()
    life.paused_until_s = 5.0
    for name, delay_s in (("one", 1.0), ("two", 2.0), ("three", 6.0)):
        kernel.at(delay_s, lambda name=name: done.append((name, kernel.now_s)), life)
    kernel.run(10.0)
    assert done == [("one", 5.0), ("two", 5.0), ("three", 6.0)]


def test_a_coroutine_waits_for_time_and_for_promises() -> None:
    kernel, life = Kernel(start_s=0.0), Life("a")
    clock, promise = SimClock(kernel, life), Promise[str](kernel)
    done: list[tuple[str, float]] = []

    async def waits() -> None:
        await clock.sleep(1.0)
        done.append(("slept", clock.monotonic()))
        done.append((await promise, clock.wall()))
        done.append((await promise, clock.wall()))

    kernel.spawn(waits(), life)
    kernel.at(3.0, lambda: promise.set("there"))
    kernel.at(4.0, lambda: promise.set("too late"))
    kernel.run(10.0)
    assert done == [("slept", 1.0), ("there", 3.0), ("there", 3.0)]


def test_what_fails_is_raised_where_it_is_awaited_and_kept_where_it_is_not() -> None:
    kernel, life = Kernel(), Life("a")
    promise, caught = Promise[None](kernel), list[str]()
    promise.fail(KeyError("gone"))

    async def careful() -> None:
        with pytest.raises(KeyError):
            await promise
        caught.append("caught")

    async def careless() -> None:
        await promise

    kernel.spawn(careful(), life)
    kernel.spawn(careless(), life)
    kernel.run(1.0)
    assert caught == ["caught"]
    assert [repr(error) for error in kernel.failures] == ["KeyError('gone')"]


def test_a_coroutine_ends_with_its_life() -> None:
    kernel, life, done = Kernel(), Life("a"), list[str]()
    clock = SimClock(kernel, life)

    async def waits() -> None:
        await clock.sleep(1.0)
        done.append("woke")

    kernel.spawn(waits(), life)
    life.alive = False
    kernel.run(2.0)
    assert done == []
