# pyright: reportUnknownMemberType=false
"""Hears an engine's KV events, in order, and asks again for what it missed."""

import asyncio
from collections.abc import Callable, Sequence

import structlog
import zmq
import zmq.asyncio

from kvtide.connect.kv_events import (
    NUMBER_BYTES,
    KvEvent,
    KvEventBatch,
    KvEventError,
    decode_batch,
    read_frames,
)
from kvtide.router.event_order import EventOrder, Step

REPLAY_LIMIT_S = 10.0
_END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
_KEPT_MESSAGES = 100_000
_REPLAYED_PARTS = 2
_PAUSE_S = 0.2

log = structlog.get_logger("kvtide.router")


class EventFeed:
    """One engine's events. ``take`` gets them, ``forget`` is told of what is lost.

    Both are called in the loop.
    """

    def __init__(
        self,
        endpoint: str,
        replay: str,
        topic: str,
        *,
        take: Callable[[Sequence[KvEvent]], None],
        forget: Callable[[], None],
    ) -> None:
        """Nothing is opened before ``run``."""
        self._endpoint, self._replay, self._topic = endpoint, replay, topic
        self._take, self._forget = take, forget
        self._order = EventOrder()
        self._resync = asyncio.Event()
        self.heard = 0
        self.gaps = 0

    def resync(self) -> None:
        """Forget all, and learn it again from what the engine still keeps."""
        self._resync.set()

    async def run(self) -> None:
        """Hear until cancelled."""
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.set_hwm(_KEPT_MESSAGES)
            socket.subscribe(self._topic)
            socket.connect(self._endpoint)
            self._resync.set()
            while True:
                try:
                    await self._turn(context, socket)
                except Exception:
                    # what an engine says must not end the hearing of what it says next
                    log.exception("kv events can't be taken")
                    self._lose()
                    await asyncio.sleep(_PAUSE_S)

    async def _turn(
        self, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket
    ) -> None:
        if self._resync.is_set():
            self._resync.clear()
            await self._afresh(context)
        if await socket.poll(200):
            await self._heard(context, await socket.recv_multipart())

    async def _heard(
        self, context: zmq.asyncio.Context, parts: Sequence[bytes]
    ) -> None:
        try:
            _, number, batch = read_frames(parts)
        except KvEventError as error:
            log.warning("kv events can't be read", reason=str(error))
            return
        match self._order.live(number, batch.wall_s):
            case Step.APPLY:
                self._apply(number, batch)
            case Step.ASK:
                self.gaps += 1
                missed = await self._missed(context, self._order.next)
                if not missed or missed[0][0] != self._order.next:
                    log.info("kv events lost", first=self._order.next, came=number)
                    self._lose()
                self._apply_all([*missed, (number, batch)])
            case Step.AFRESH:
                log.info("the engine has begun anew", number=number)
                await self._afresh(context)
            case Step.IGNORE:
                pass

    async def _afresh(self, context: zmq.asyncio.Context) -> None:
        self._lose()
        self._order.restart()
        self._apply_all(await self._missed(context, 0))

    def _lose(self) -> None:
        self._forget()

    def _apply_all(self, batches: Sequence[tuple[int, KvEventBatch]]) -> None:
        done = -1
        for number, batch in batches:
            if number > done:
                self._apply(number, batch)
                done = number

    def _apply(self, number: int, batch: KvEventBatch) -> None:
        self.heard += 1
        self._order.taken(number, batch.wall_s)
        self._take(batch.events)

    async def _missed(
        self, context: zmq.asyncio.Context, start: int
    ) -> list[tuple[int, KvEventBatch]]:
        """What the engine still keeps from ``start`` on; empty if it can't be asked."""
        if not self._replay:
            return []
        found: list[tuple[int, KvEventBatch]] = []
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.set_hwm(_KEPT_MESSAGES)
            socket.connect(self._replay)
            try:
                async with asyncio.timeout(REPLAY_LIMIT_S):
                    await socket.send_multipart(
                        (b"", start.to_bytes(NUMBER_BYTES, "big"))
                    )
                    while True:
                        number, payload = _replayed(await socket.recv_multipart())
                        if number == _END:
                            return found
                        found.append(
                            (int.from_bytes(number, "big"), decode_batch(payload))
                        )
            except (TimeoutError, KvEventError) as error:
                log.warning("no replay of kv events", reason=str(error) or "no answer")
                return []


def _replayed(parts: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Number and payload. vLLM before 0.30 leaves the topic out.

    Raises:
        KvEventError: it has other parts.
    """
    if len(parts) < _REPLAYED_PARTS:
        raise KvEventError("a replayed message has too few parts")
    number, payload = parts[-_REPLAYED_PARTS:]
    return number, payload
