"""Background tasks with an owner: what a scope starts, it ends."""

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self


class TaskScope:
    """Owns the background tasks of one object with a longer life than a function.

    ``asyncio.TaskGroup`` fits a function; a service needs tasks that live between
    its ``start`` and its ``close``. Use as an async context manager: leaving it
    cancels every task and waits for them.

    A task that fails calls ``on_error`` with its exception (default: the loop's
    exception handler); it never disappears silently.
    """

    def __init__(
        self, *, on_error: Callable[[BaseException], None] | None = None
    ) -> None:
        """Start empty; no loop is needed yet."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_error = on_error
        self._closed = False

    def spawn(self, coro: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Run ``coro`` until it ends or the scope closes.

        Raises:
            RuntimeError: the scope is closed; the coroutine is closed unstarted.
        """
        if self._closed:
            coro.close()
            message = f"task {name!r} started after its owner closed"
            raise RuntimeError(message)
        task = asyncio.get_running_loop().create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def __len__(self) -> int:
        """Tasks that still run."""
        return len(self._tasks)

    async def close(self, *, timeout_s: float = 5.0) -> None:
        """Cancel all tasks and wait for them, at most ``timeout_s``.

        Raises:
            TimeoutError: a task did not end in time; the message names it.
        """
        self._closed = True
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        _, pending = await asyncio.wait(tasks, timeout=timeout_s / 2)
        if pending:
            # ``asyncio.wait_for`` can lose a cancellation that comes as its inner wait
            # ends (Python 3.11), in our code or in a library's: ask once more
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=timeout_s / 2)
        if pending:
            names = ", ".join(sorted(task.get_name() for task in pending))
            message = f"tasks did not end within {timeout_s} s: {names}"
            raise TimeoutError(message)

    async def __aenter__(self) -> Self:
        """Enter; nothing starts by itself."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; see ``close``."""
        await self.close()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        exc = task.exception()
        if exc is None:
            return
        if self._on_error is not None:
            self._on_error(exc)
            return
        task.get_loop().call_exception_handler(
            {
                "message": f"background task {task.get_name()!r} failed",
                "exception": exc,
                "task": task,
            }
        )
