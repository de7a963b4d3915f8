"""Moves whole pages between an engine's memory and the pool, for one rank."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import structlog

from kvtide.connect.client import EngineClient, Pieces
from kvtide.connect.pages import Pages
from kvtide.connect.prefix_plan import Claim, Move, Task
from kvtide.connect.space_book import SpaceBook

log = structlog.get_logger("kvtide.connect")

MAX_LOADS = 256


@dataclass(frozen=True, slots=True)
class Finished:
    """Loads that are over, well or not.

    Attributes:
        requests: all of them, each once.
        failed: those of them that lack a block.
        bad_blocks: the blocks that they lack; what is in them is undefined.
    """

    requests: set[str] = field(default_factory=set[str])
    failed: set[str] = field(default_factory=set[str])
    bad_blocks: set[int] = field(default_factory=set[int])


class PageMover:
    """Loads in a thread of its own, saves in the caller's. For one engine thread.

    The engine must leave a request's pages alone until its load is finished, and a
    page's content as it is during ``save``.
    """

    def __init__(
        self, client: EngineClient, pages: Sequence[Pages], book: SpaceBook
    ) -> None:
        """``pages`` and ``book`` by cache group."""
        self._client = client
        self._pages = pages
        self._book = book
        self._lock = threading.Lock()
        self._over = threading.Condition(self._lock)
        self._finished = Finished()
        self._open = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvtide-load")

    def close(self) -> None:
        """Wait for loads under way; each is bounded. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    # ---- loading

    def load(self, task: Task) -> None:
        """Begin to load a request's blocks; ``finished`` will name the request.

        The limit of a load is that of all its moves together, behind others or not.
        """
        end_s = self._client.now_s() + self._client.load_limit_s
        with self._lock:
            self._open += 1
            crowded = self._open > MAX_LOADS
        if crowded:
            self._ended(task, _blocks(task.moves))
        else:
            self._thread.submit(self._load, task, end_s)

    @property
    def loading(self) -> bool:
        """Whether some load is not over."""
        return self._open > 0

    def pause(self, limit_s: float) -> None:
        """Let other threads run until a load is over that ``finished`` has not named.

        At most ``limit_s``. For an engine that has nothing to do and comes back at once:
        it would keep the interpreter to itself, and whoever loads needs it for moments,
        thousands of times, for each of which he would wait 5 ms.
        """
        with self._over:
            if not self._finished.requests:
                self._over.wait(limit_s)

    def finished(self) -> Finished:
        """What has ended since the last call."""
        with self._lock:
            done, self._finished = self._finished, Finished()
            return done

    def _load(self, task: Task, end_s: float) -> None:
        bad = _blocks(task.moves)
        try:
            for move in task.moves:
                bad -= self._load_move(move, task.claim, end_s)
        except Exception:
            # the engine computes what it has not got
            log.exception("load_failed", request=task.request)
        self._ended(task, bad)

    def _load_move(self, move: Move, claim: Claim, end_s: float) -> set[int]:
        left_s = end_s - self._client.now_s()
        if left_s <= 0:
            return set()
        with self._lock:
            space = self._book.space(move.group, claim)
        pages = self._pages[move.group]

        def deliver(i: int, pieces: Pieces) -> None:
            pages.put(move.blocks[i], pieces)

        had = self._client.load(space, space.keys(move.names), deliver, limit_s=left_s)
        return {block for block, ok in zip(move.blocks, had, strict=True) if ok}

    def _ended(self, task: Task, bad: set[int]) -> None:
        with self._over:
            self._open -= 1
            self._over.notify_all()
            self._finished.requests.add(task.request)
            if bad:
                self._finished.failed.add(task.request)
                self._finished.bad_blocks.update(bad)

    # ---- saving

    def save(self, tasks: Sequence[Task]) -> None:
        """Hand these blocks to the pool; nothing of them is read any more after it.

        Within one limit for all of them: what is left over then is not pooled.
        """
        end_s = self._client.now_s() + self._client.save_limit_s
        together: dict[tuple[int, Claim, bool], dict[bytes, int]] = {}
        for task in tasks:
            for move in task.moves:
                sort = (move.group, task.claim, task.kept)
                wanted = together.setdefault(sort, {})
                wanted.update(zip(move.names, move.blocks, strict=True))
        for (group, claim, kept), wanted in together.items():
            left_s = end_s - self._client.now_s()
            if left_s <= 0:
                break
            try:
                self._save(group, claim, wanted, left_s, kept=kept)
            except Exception:
                # a block that is not pooled is computed again some day
                log.exception("save_failed", blocks=len(wanted))

    def _save(
        self,
        group: int,
        claim: Claim,
        wanted: dict[bytes, int],
        limit_s: float,
        *,
        kept: bool,
    ) -> None:
        with self._lock:
            space = self._book.space(group, claim)
        blocks, pages = tuple(wanted.values()), self._pages[group]
        keys = space.keys(tuple(wanted))
        self._client.save(
            space, keys, lambda i: pages.pieces(blocks[i]), limit_s=limit_s
        )
        if kept:
            self._client.keep(keys)


def _blocks(moves: Sequence[Move]) -> set[int]:
    return {block for move in moves for block in move.blocks}
