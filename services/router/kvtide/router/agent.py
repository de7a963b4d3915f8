"""An engine among the workers: what it is asked is answered by its server.

One node with three roles. As prefill it takes work and does nothing, for the engine
prefills what it is asked to answer; as decode it proxies; as a store it tells what its
engine has cached. The engine itself knows nothing of us.
"""

import asyncio
from collections.abc import Sequence

import httpx
import structlog

from kvtide.bus import Hop, Incoming, Node, Subscription
from kvtide.bus.messages import (
    Ack,
    AnyMessage,
    Cancel,
    DecodeWork,
    Failure,
    Message,
    Owned,
    PrefillWork,
    SnapshotPull,
    StoreLoad,
    TokenAck,
    TokenPull,
    WorkAccepted,
)
from kvtide.bus.outbox import Outbox
from kvtide.connect.kv_events import KvEvent
from kvtide.kv import KeySpace, ModelFacts, NodeRef, RequestRef, Role, SpaceId
from kvtide.router.cache_map import CacheMap, Moved
from kvtide.router.engine_client import EngineClient
from kvtide.router.engine_load import EngineLoad
from kvtide.router.errors import EngineAnswerError
from kvtide.router.event_feed import EventFeed
from kvtide.router.events import (
    AckArrived,
    Ask,
    Broken,
    Command,
    Ended,
    Event,
    HangUp,
    PullArrived,
    Said,
    WorkArrived,
)
from kvtide.router.metrics import RouterMetrics
from kvtide.router.salts import Salts
from kvtide.router.serving import Serving
from kvtide.router.settings import RouterSettings
from kvtide.router.shelf import Shelf
from kvtide.runtime import TaskScope
from kvtide.worker import events as common
from kvtide.worker.custody import refused
from kvtide.worker.driver import TICK_S, Driver

_MOST_SPACES = 10_000
_S_TO_MS = 1000.0

log = structlog.get_logger("kvtide.router")


class EngineAgent(Driver[Event, Command]):
    """See the module. ``start`` returns at once; ``close`` drains."""

    def __init__(
        self,
        node: Node,
        client: EngineClient,
        facts: ModelFacts,
        settings: RouterSettings,
        metrics: RouterMetrics,
        *,
        engine_model: str,
    ) -> None:
        """Nothing is heard before ``start``."""
        serving = Serving(node.ref, facts, most_open=settings.max_open)
        tasks = TaskScope(on_error=_task_failed)
        super().__init__(node, Role.DECODE, (Hop.WORK, Hop.CONTROL), serving, tasks)
        self._serving = serving
        self._client = client
        self._facts = facts
        self._settings = settings
        self._metrics = metrics
        self._engine_model = engine_model
        self._outbox = Outbox(node.bus)
        self._streams: dict[RequestRef, asyncio.Task[None]] = {}
        self._load = EngineLoad()
        self._there = False
        self._salts = Salts(node.secret)
        self._spaces: dict[str, KeySpace | None] = {}
        self._cache = CacheMap(self._space_of)
        self._shelf = Shelf(node.ref, facts.block_tokens)
        self._feed: EventFeed | None = None
        self._others: list[Subscription] = []
        if settings.events:
            self._feed = EventFeed(
                settings.events,
                settings.replay,
                settings.topic,
                take=self._cached,
                forget=self._forget,
            )

    # ---- life

    async def start(self) -> None:
        """Listen, and take work while the engine answers."""
        node = self._node
        node.models(self._facts)
        # one that has served nothing yet must not look faster than one that has
        node.set_worker_class(
            self._settings.worker_class or f"engines of {self._facts.name}"
        )
        node.on_fenced(self._shelf.reborn)
        for hop in (Hop.WORK, Hop.CONTROL):
            self._others.append(await node.inbox(Role.PREFILL, hop, self._asked))
        for hop in (Hop.POOL, Hop.QUERY):
            self._others.append(await node.inbox(Role.STORE, hop, self._asked))
        self._tasks.spawn(self._outbox.run(), name="router outbox")
        self._tasks.spawn(self._poll(), name="engine metrics")
        if self._feed is not None:
            self._tasks.spawn(self._feed.run(), name="engine events")
        await self.listen()

    async def close(self) -> None:
        """Take no more work, let what runs end within the limit, end everything."""
        clock = self._node.clock
        self._tell(common.Drain())
        end_s = clock.monotonic() + self._settings.drain_s
        while not self._serving.idle and clock.monotonic() < end_s:
            await clock.sleep(TICK_S)
        self._tell(common.GiveUp())
        await self._outbox.flushed(timeout_s=1.0)
        for subscription in (*self._subscriptions, *self._others):
            await subscription.close()
        self._closed = True
        await self._tasks.close()

    # ---- for a driver

    def _store(self) -> NodeRef | None:
        return self._node.ref if self._there else None

    def _event_of(self, message: AnyMessage) -> Event | None:
        match message:
            case DecodeWork():
                return WorkArrived(message)
            case TokenAck():
                return AckArrived(message)
            case TokenPull():
                return PullArrived(message)
            case _:
                return None

    def _do(self, command: Command) -> None:
        match command:
            case Ask(work):
                ref = RequestRef(work.request, work.attempt)
                name = f"answer {work.request}"
                stream = self._tasks.spawn(self._stream(ref, work), name=name)
                self._streams[ref] = stream
            case HangUp(ref):
                stream = self._streams.pop(ref, None)
                if stream is not None:
                    stream.cancel()
            case _:
                pass

    def _post(self, subject: str, message: Message) -> None:
        self._outbox.post(subject, message)

    def _failed(self, command: Command, error: Exception) -> Event | None:
        log.error("operation failed", command=type(command).__name__, exc_info=error)
        if isinstance(command, Ask):
            ref = RequestRef(command.work.request, command.work.attempt)
            return Broken(ref, "internal", str(error))
        return None

    # ---- what the other two roles are asked

    async def _asked(self, incoming: Incoming) -> Message | None:
        match incoming.message:
            case PrefillWork() as work:
                ref = RequestRef(work.request, work.attempt)
                refusal = self._serving.unfit(work)
                if refusal is not None:
                    return refused(ref, refusal)
                return WorkAccepted(
                    request=work.request, attempt=work.attempt, start_ms=0.0
                )
            case Cancel():
                return Ack()
            case Owned():
                return None
            case SnapshotPull() as pull:
                return self._shelf.page(pull)
            case message:
                kind = type(message).__name__
                reason = f"{kind}: an engine of others keeps its cache to itself"
                return Failure(code="not_here", reason=reason)

    # ---- the cache

    def _space_of(self, salt: str) -> KeySpace | None:
        if salt not in self._spaces:
            if len(self._spaces) >= _MOST_SPACES:
                self._spaces.clear()
            named = self._salts.read(salt)
            self._spaces[salt] = None
            if named is not None:
                tenant, own = named
                space = SpaceId(tenant, self._facts, own)
                self._spaces[salt] = KeySpace(self._node.secret, space)
        return self._spaces[salt]

    def _cached(self, events: Sequence[KvEvent]) -> None:
        self._moved(self._cache.apply(events))
        self._metrics.events.inc(len(events))

    def _forget(self) -> None:
        self._moved(self._cache.clear())

    def _moved(self, moved: Moved) -> None:
        subject = self._node.subjects.blocks(self._node.ref.node)
        for change in self._shelf.changed(moved):
            self._post(subject, change)
        self._metrics.blocks.set(len(self._shelf))

    # ---- the engine

    async def _poll(self) -> None:
        """Whether the engine answers, and how loaded it is."""
        clock = self._node.clock
        heard_s = clock.monotonic()
        while True:
            try:
                seen = await self._client.metrics()
            except (httpx.HTTPError, TimeoutError) as error:
                refuses = isinstance(error, httpx.ConnectError)
                if refuses or clock.monotonic() - heard_s > self._settings.away_s:
                    self._away(error)
            else:
                heard_s = clock.monotonic()
                self._load.metrics = seen or self._load.metrics
                self._back()
            self._report()
            await clock.sleep(self._settings.poll_s)

    def _away(self, error: Exception) -> None:
        if self._there:
            reason = str(error) or type(error).__name__
            log.warning("the engine is away", url=self._client.url, reason=reason)
            self._there = False
            self._watch_store()
            self._forget()

    def _back(self) -> None:
        if not self._there:
            log.info("the engine answers", url=self._client.url)
            self._there = True
            if self._feed is not None:
                self._feed.resync()

    def _report(self) -> None:
        self._serving.current_load = self._load.decode()
        self._metrics.there.set(self._there)
        self._metrics.open.set(self._serving.open)
        shelf = StoreLoad(used_slots=len(self._shelf), seq=self._shelf.seq)
        self._node.report(self._load.prefill(), shelf)

    async def _stream(self, ref: RequestRef, work: DecodeWork) -> None:
        ended: Ended | Broken
        try:
            async with asyncio.timeout(max(0.001, work.deadline_ms / _S_TO_MS)):
                ended = await self._answered(ref, work)
        except TimeoutError:
            ended = Broken(ref, "deadline", "the time limit is over")
        except EngineAnswerError as error:
            ended = Broken(ref, error.code, str(error))
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            ended = Broken(ref, "engine_away", f"the engine: {reason}")
        except Exception as error:
            # whatever it is, who waits for the answer must hear of it
            log.exception("answer failed", request=ref.request)
            ended = Broken(ref, "internal", f"{type(error).__name__}: {error}")
        self._streams.pop(ref, None)
        if isinstance(ended, Broken):
            log.warning(
                "no answer", request=ref.request, code=ended.code, reason=ended.reason
            )
        self._metrics.ended(ended.code if isinstance(ended, Broken) else "")
        self._tell(ended)

    async def _answered(self, ref: RequestRef, work: DecodeWork) -> Ended:
        clock, load = self._node.clock, self._load
        alone = self._serving.open == 1 and not load.metrics.running
        reused = len(work.reuse) * self._facts.block_tokens
        sent_s = last_s = clock.monotonic()
        cached: int | None = None
        salt = self._salts.of(work.tenant, work.salt)
        answer = self._client.answer(work, self._engine_model, salt)
        try:
            async for heard in answer:
                if heard.cached_tokens is not None:
                    cached = heard.cached_tokens
                if heard.delta is None:
                    continue
                now_s = clock.monotonic()
                ms = (now_s - last_s) * _S_TO_MS
                if heard.delta.ids and last_s == sent_s:
                    load.began(len(work.tokens) - reused, reused, ms, alone=alone)
                    self._node.count_step()
                elif heard.delta.ids:
                    load.stepped(len(heard.delta.ids), ms)
                    self._node.count_step()
                last_s = now_s if heard.delta.ids else last_s
                self._tell(Said(ref, heard.delta))
        finally:
            await answer.aclose()
        return Ended(ref, cached)


def _task_failed(error: BaseException) -> None:
    log.error("router task failed", exc_info=error)
