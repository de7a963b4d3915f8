# pyright: reportUnknownMemberType=false, reportAttributeAccessIssue=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Publishes KV events as vLLM does: PUB, and a ROUTER that repeats the last ones.

A message has three frames: topic, number (8 bytes, big-endian), payload. Who sends an
empty frame and a number to the replay socket gets each message from that number on that
is still kept, behind an empty frame, and then one with number -1.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

import structlog
import zmq
import zmq.asyncio

from kvtide.connect.kv_events import NUMBER_BYTES, KvEvent, KvEventBatch, frames
from kvtide.runtime import Clock, ConfigError

KEPT = 10_000
_MOST_WAITING = 100_000
_END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
_REPLAY_PARTS = 3

log = structlog.get_logger("kvtide.connect")


class KvPublisher:
    """One publisher. ``open`` binds, ``run`` sends until cancelled, ``close`` ends it."""

    def __init__(
        self,
        endpoint: str,
        replay: str,
        topic: str,
        clock: Clock,
        *,
        kept: int = KEPT,
    ) -> None:
        """``replay`` may be empty. The last ``kept`` messages are repeated."""
        self._endpoint, self._replay, self._topic = endpoint, replay, topic
        self._clock = clock
        self._kept: deque[tuple[bytes, bytes, bytes]] = deque(maxlen=kept)
        self._waiting: asyncio.Queue[Sequence[KvEvent]] = asyncio.Queue(_MOST_WAITING)
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []
        self.number = 0
        """Of the next message."""
        self.lost = 0

    def open(self) -> None:
        """Bind the sockets.

        Raises:
            ConfigError: an address can't be bound.
        """
        kinds = [(zmq.PUB, self._endpoint, "kv_events")]
        if self._replay:
            kinds.append((zmq.ROUTER, self._replay, "kv_events_replay"))
        for kind, address, key in kinds:
            socket = self._context.socket(kind)
            socket.setsockopt(zmq.LINGER, 0)
            socket.set_hwm(_MOST_WAITING)
            self._sockets.append(socket)
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                self.close()
                raise ConfigError(
                    f"KV events can't be published at {address}: {error}", key=key
                ) from error

    def addresses(self) -> tuple[str, ...]:
        """Where it is bound."""
        return tuple(socket.last_endpoint.decode() for socket in self._sockets)

    def post(self, events: Sequence[KvEvent]) -> None:
        """Put a batch in line; in the loop. A line that is full loses it, and says so.

        A number is left out then, so that subscribers know that they have missed something.
        """
        if not events:
            return
        try:
            self._waiting.put_nowait(events)
        except asyncio.QueueFull:
            self.number += 1
            self.lost += 1
            log.warning("kv events lost", lost=self.lost)

    async def run(self) -> None:
        """Send what is posted, and repeat what is asked for."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send())
            if self._replay:
                group.create_task(self._repeat())

    def close(self) -> None:
        """Close the sockets; what waits is dropped. Idempotent."""
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()

    async def _send(self) -> None:
        while True:
            events = await self._waiting.get()
            batch = KvEventBatch(self._clock.wall(), tuple(events), 0)
            message = frames(self._topic, self.number, batch)
            self.number += 1
            self._kept.append(message)
            await self._sockets[0].send_multipart(message)

    async def _repeat(self) -> None:
        socket = self._sockets[1]
        while True:
            asked = await socket.recv_multipart()
            if len(asked) != _REPLAY_PARTS or len(asked[2]) != NUMBER_BYTES:
                log.warning("no replay request", frames=len(asked))
                continue
            start = int.from_bytes(asked[2], "big")
            for message in tuple(self._kept):
                if int.from_bytes(message[1], "big") >= start:
                    await socket.send_multipart((asked[0], b"", *message))
            await socket.send_multipart((asked[0], b"", b"", _END, b""))
