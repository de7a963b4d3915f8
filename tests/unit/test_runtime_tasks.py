"""What a scope starts, it ends, even where a library loses a cancellation."""

import asyncio

import pytest

from kvtide.runtime import TaskScope


async def loses_cancellations(count: int) -> None:
    """Wait for ever, deaf to the first ``count`` cancellations."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            count -= 1
            if count < 0:
                raise


async def test_a_task_that_loses_its_cancellation_is_asked_again() -> None:
    scope = TaskScope()
    task = scope.spawn(loses_cancellations(1), name="deaf once")
    await asyncio.sleep(0)
    await scope.close(timeout_s=0.2)
    assert task.cancelled()


async def test_a_task_that_does_not_end_is_named() -> None:
    scope = TaskScope()
    task = scope.spawn(loses_cancellations(2), name="deaf")
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError, match="deaf"):
        await scope.close(timeout_s=0.2)
    task.cancel()
    await asyncio.wait((task,), timeout=5)
    assert task.cancelled()
