"""The pool, for an engine's own threads: synchronous, bounded, and never an error."""

import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import structlog

from kvtide.bus import load_secret
from kvtide.connect.counts import ClientCounts, Counter
from kvtide.connect.index import BlockIndex
from kvtide.connect.membership import Away, Membership
from kvtide.connect.prefix_plan import Claim
from kvtide.connect.rest import Rest
from kvtide.connect.session import Session
from kvtide.connect.settings import ConnectSettings
from kvtide.connect.shape import BlockShape
from kvtide.connect.space import EngineSpace, ForeignSpace
from kvtide.connect.staging import Staging
from kvtide.kv import BlockKey, KeySpace, ModelFacts, SpaceId, TenantId
from kvtide.pool import MissReason, PutClosed, ReadOutcome
from kvtide.pool.put import Put
from kvtide.runtime import Clock, SystemClock

Pieces = Sequence[memoryview]
Deliver = Callable[[int, Pieces], None]
"""Number of a block in the call, and its verified pieces, valid during the call."""

Supply = Callable[[int], Pieces]
"""Number of a block in the call → its pieces, which are copied during the call."""

Work = Callable[[Session], Coroutine[Any, Any, None]]

log = structlog.get_logger("kvtide.connect")

_SLOW = (MissReason.UNREACHABLE, MissReason.TIMED_OUT)
"""Misses that took their time; the next one would too."""

KEEP_LOOK_S = 0.02
"""How often it is looked whether what is to be kept has been saved."""

ANSWER_GRACE_S = 0.1
"""What the loop may take to say that its own limit is over."""


class EngineClient:
    """One process's way to the pool. Every call is safe from any thread.

    While kvtide is away (not started yet, NATS or the store down, restarted) look-ups
    find what is known to be there, loads miss, and saves are dropped; each call returns
    within its limit. Nothing but a wrong setting is ever raised.
    """

    def __init__(self, settings: ConnectSettings, clock: Clock | None = None) -> None:
        """Begin to join the cluster; returns at once.

        Raises:
            ConfigError: there is no cluster secret, or it can't be used.
        """
        self._settings = settings
        self._clock = clock or SystemClock()
        self._secret = load_secret(settings.secret_path())
        self._index = BlockIndex(settings.index_blocks)
        self._membership = Membership(settings, self._index, self._clock)
        self._staging = Staging(settings.staging_bytes)
        self._counter = Counter()
        self._load_rest = Rest(settings.rest_s, settings.rest_limit_s)
        self._save_rest = Rest(settings.rest_s, settings.rest_limit_s)
        self._open_saves = 0
        self._saves = threading.Condition()
        self._membership.start()

    def close(self) -> None:
        """Leave the cluster, in bounded time. Idempotent."""
        self.flush(self._settings.commit_timeout_s)
        self._membership.close()

    def __enter__(self) -> Self:
        """Nothing more: it has begun to join."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    # ---- what is so

    @property
    def joined(self) -> bool:
        """Whether this process is a node of the cluster."""
        return self._membership.session is not None

    @property
    def takes_blocks(self) -> bool:
        """Whether a store on this host takes blocks now."""
        session = self._membership.session
        return session is not None and session.takes_blocks

    @property
    def load_limit_s(self) -> float:
        """What a load may take, its wait included."""
        return self._settings.load_timeout_s

    @property
    def save_limit_s(self) -> float:
        """What a save may take."""
        return self._settings.save_timeout_s

    def now_s(self) -> float:
        """The time by which limits are measured."""
        return self._clock.monotonic()

    def counts(self) -> ClientCounts:
        """What was done since the start."""
        return self._counter.now()

    def space(
        self,
        engine: EngineSpace,
        shape: BlockShape,
        *,
        tenant: str = "",
        salt: str = "",
        adapter: str = "",
    ) -> ForeignSpace:
        """The keys of blocks of this shape; ``tenant`` "" is the settings' own."""
        owner = TenantId(tenant or self._settings.tenant)
        return ForeignSpace(
            self._secret, engine, shape, owner, salt=salt, adapter=adapter
        )

    def gateway_keys(self, facts: ModelFacts, claim: Claim) -> KeySpace:
        """The keys that gateways derive for this model's requests of a claim."""
        tenant = TenantId(claim.tenant or self._settings.tenant)
        return KeySpace(self._secret, SpaceId(tenant, facts, claim.salt))

    # ---- looking up

    def exists(self, keys: Sequence[BlockKey]) -> int:
        """How many of ``keys``, from the first on, are in the pool. Asks nobody.

        0 while loads rest after a failure: what can't be had now is no hit.
        """
        count = 0
        if self.joined and self._load_rest.over(self._clock.monotonic()):
            count = self._index.prefix(keys)
        self._counter.add(
            ClientCounts(lookups=1, lookup_keys=len(keys), hit_keys=count)
        )
        return count

    # ---- loading

    def load(
        self,
        space: ForeignSpace,
        keys: Sequence[BlockKey],
        deliver: Deliver,
        *,
        limit_s: float | None = None,
    ) -> tuple[bool, ...]:
        """Hand each block that can be had, verified, to ``deliver`` in this thread.

        The engine's own memory never sees a byte that was not verified, nor one that
        comes after the limit. What ``deliver`` raises is raised here.
        """
        started_s = self._clock.monotonic()
        end_s = started_s + (self.load_limit_s if limit_s is None else limit_s)
        had = [False] * len(keys)
        batch = max(1, self._staging.nbytes // space.shape.nbytes)
        for start in range(0, len(keys), batch):
            part = keys[start : start + batch]
            if not self._load_batch(space, part, start, deliver, had, end_s):
                break
        loaded = sum(had)
        self._counter.add(
            ClientCounts(
                loaded_blocks=loaded,
                missed_blocks=len(keys) - loaded,
                loaded_bytes=loaded * space.shape.nbytes,
                load_s=self._clock.monotonic() - started_s,
            )
        )
        return tuple(had)

    def _load_batch(
        self,
        space: ForeignSpace,
        keys: Sequence[BlockKey],
        start: int,
        deliver: Deliver,
        had: list[bool],
        end_s: float,
    ) -> bool:
        """Load one batch; false: there is no point in the next one."""
        now_s = self._clock.monotonic()
        if now_s >= end_s or not self._load_rest.over(now_s):
            self._counter.add(ClientCounts(away=1))
            return False
        copies = [(i, self._index.find(key)) for i, key in enumerate(keys)]
        found = [(i, copy) for i, copy in copies if copy is not None]
        if not found:
            return True
        buffers = self._staging.take(len(found), space.shape.nbytes)
        sinks = [partial(_half, buffer, space.shape) for buffer in buffers]
        located = [copy for _, copy in found]
        left_s = end_s - now_s

        async def read(session: Session) -> Sequence[ReadOutcome]:
            return await session.read(space, located, sinks, left_s)

        try:
            outcomes = self._membership.call(read, left_s + ANSWER_GRACE_S)
        except Away as away:
            # the loop may still write into the buffers: they are not used again
            self._failed(self._load_rest, away)
            return False
        for (i, _), outcome, buffer in zip(found, outcomes, buffers, strict=True):
            if outcome.ok:
                deliver(start + i, space.shape.cut(buffer))
                had[start + i] = True
        self._staging.give_back(buffers)
        if any(outcome.ok for outcome in outcomes):
            self._load_rest.worked()
            return True
        log.info("nothing_loaded", reason=outcomes[0].detail)
        if any(outcome.miss in _SLOW for outcome in outcomes):
            self._load_rest.failed(self._clock.monotonic())
            return False
        return True

    # ---- saving

    def save(
        self,
        space: ForeignSpace,
        keys: Sequence[BlockKey],
        supply: Supply,
        *,
        limit_s: float | None = None,
    ) -> int:
        """Copy blocks into slots of the store on this host; how many are or were there.

        When it returns nothing of the engine's memory is read any more; the store checks
        and publishes what was written in the background (``flush`` waits for that).
        What ``supply`` raises is raised here.
        """
        started_s = self._clock.monotonic()
        end_s = started_s + (self.save_limit_s if limit_s is None else limit_s)
        missing = [i for i, key in enumerate(keys) if not self._index.has(key)]
        present = len(keys) - len(missing)
        written = 0
        if missing:
            put = self._begin(space, [keys[i] for i in missing], end_s)
            if put is not None:
                written, there = self._write(space, put, missing, supply, end_s)
                present += there
        self._counter.add(
            ClientCounts(
                present_blocks=present,
                refused_blocks=len(keys) - present - written,
                saved_bytes=written * space.shape.nbytes,
                save_s=self._clock.monotonic() - started_s,
            )
        )
        return present + written

    def flush(self, limit_s: float) -> bool:
        """Wait until the store has answered for all saves; false: it has not yet."""
        with self._saves:
            return self._saves.wait_for(lambda: self._open_saves == 0, limit_s)

    def _begin(
        self, space: ForeignSpace, keys: Sequence[BlockKey], end_s: float
    ) -> Put | None:
        """Slots, within the limit; None: the blocks are not pooled."""
        now_s = self._clock.monotonic()
        session = self._membership.session
        if session is None or not self._save_rest.over(now_s):
            self._counter.add(ClientCounts(away=1))
            return None
        if not session.takes_blocks or not self._reserve_save():
            return None
        lease = session.lease()
        left_s = end_s - now_s

        async def begin(session: Session) -> Put:
            return await session.begin(lease, space, keys, left_s)

        try:
            put = self._membership.call(begin, left_s + ANSWER_GRACE_S)
        except Away as away:
            self._failed(self._save_rest, away)
            self._save_ended()
            if away.timed_out:
                self._in_background(lambda session: session.abandon(lease))
            return None
        self._save_rest.worked()
        return put

    def _write(
        self,
        space: ForeignSpace,
        put: Put,
        missing: Sequence[int],
        supply: Supply,
        end_s: float,
    ) -> tuple[int, int]:
        """Write what has a slot; blocks that were written, and that were there."""
        written = there = 0
        try:
            for number, i in enumerate(missing):
                if put.slots[number].existing is not None:
                    there += 1
                elif put.writable(number) and self._clock.monotonic() < end_s:
                    _write_block(put, number, supply(i), space.shape)
                    written += 1
        except PutClosed as closed:
            log.info("save_ended", reason=str(closed))
            written = 0
        finally:
            self._finish(put)
        return written, there

    def _finish(self, put: Put) -> None:
        async def finish(session: Session) -> None:
            try:
                taken = await session.finish(put)
                self._counter.add(ClientCounts(saved_blocks=taken))
            finally:
                self._save_ended()

        if not self._in_background(finish):
            self._save_ended()

    def _reserve_save(self) -> bool:
        with self._saves:
            if self._open_saves >= self._settings.open_saves:
                return False
            self._open_saves += 1
            return True

    def _save_ended(self) -> None:
        with self._saves:
            self._open_saves -= 1
            self._saves.notify_all()

    # ---- keeping

    def pin(self, keys: Sequence[BlockKey], seconds: float) -> int:
        """Ask the stores to keep these for a while; copies kept, 0 if none answered."""

        async def pin(session: Session) -> int:
            return await session.pin(keys, seconds)

        try:
            return self._membership.call(pin, self._settings.pin_timeout_s)
        except Away as away:
            self._counter.add(ClientCounts(away=1, timeouts=int(away.timed_out)))
            return 0

    def keep(self, keys: Sequence[BlockKey]) -> None:
        """Begin a lease: have the stores keep these for ``lease_s``. Waits for nothing.

        Those that are still being saved are waited for in the background. The lease ends
        by itself; nobody has to give it back.
        """
        settings = self._settings

        async def keep(session: Session) -> None:
            end_s = self._clock.monotonic() + settings.commit_timeout_s
            while not all(map(self._index.has, keys)):
                if self._clock.monotonic() > end_s:
                    break
                await self._clock.sleep(KEEP_LOOK_S)
            await session.pin(keys, settings.lease_s)

        self._in_background(keep)

    # ---- inside

    def _in_background(self, work: Work) -> bool:
        try:
            self._membership.begin(work)
        except Away:
            return False
        return True

    def _failed(self, rest: Rest, away: Away) -> None:
        log.info("kvtide_away", reason=str(away))
        rest.failed(self._clock.monotonic())
        self._counter.add(ClientCounts(away=1, timeouts=int(away.timed_out)))


def _half(buffer: memoryview, shape: BlockShape, part: int) -> memoryview:
    size = shape.piece_bytes // 2
    return buffer[part * size : (part + 1) * size]


def _write_block(put: Put, number: int, pieces: Pieces, shape: BlockShape) -> None:
    half = shape.piece_bytes // 2
    for i, piece in enumerate(pieces):
        put.write_part(number, 2 * i, piece[:half])
        put.write_part(number, 2 * i + 1, piece[half:])
