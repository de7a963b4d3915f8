"""TCP links of ours that go between two processes and break what goes over them.

A `Link` listens where one end believes the other to be. What is held up comes late, as
with a network that lost packets for a while; nothing of a stream is ever left out.
"""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

CHUNK = 1 << 16
CORRUPTED_FROM = 1000
"""Smaller chunks are frames of a protocol; larger ones are mostly KV."""
CALL_LIMIT_S = 10.0
RESET_AT_CLOSE = struct.pack("ii", 1, 0)
NARROW_BYTES = 4 << 10
NARROW_SEGMENT = 536
"""With short segments the far kernel's own buffer stays small, too."""

Target = tuple[str, int] | Path
T = TypeVar("T")
Queue = asyncio.Queue[tuple[float, bytes]]


@dataclass(frozen=True, slots=True)
class Weather:
    """What happens to bytes: ``up`` from who connected, ``down`` to it.

    ``hold_up`` and ``hold_down`` keep all bytes of that way until the weather changes;
    ``corrupt`` is the share of large chunks downwards in which a bit is flipped.
    ``unread``: what the far end sends is not taken, so its buffers fill.
    """

    delay_s: float = 0.0
    hold_up: bool = False
    hold_down: bool = False
    corrupt: float = 0.0
    refuse: bool = False
    unread: bool = False


CLEAR = Weather()
SILENT = Weather(hold_up=True, hold_down=True)


@dataclass(eq=False)
class _Pair:
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    untold: asyncio.StreamWriter | None = None
    """Which end is not told that the other one has gone."""
    deaf: bool = False
    """Nothing that the far end sends is taken."""
    queues: list[Queue] = field(default_factory=list[Queue])


@dataclass(eq=False)
class Link:
    """One link; made by `Links.add`, whose thread it runs in."""

    target: Target
    links: "Links"
    port: int = 0
    weather: Weather = CLEAR
    corrupted: int = 0
    connections: int = 0
    narrow: bool = False
    """Whether new connections have as little room on their way as can be."""
    turned_away: set[int] = field(default_factory=set[int])
    """Ports of those who connected and whom nobody heard at the far end."""
    rewrite: "Callable[[], Rewrite] | None" = None
    _pairs: set[_Pair] = field(default_factory=set[_Pair])
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _chance: random.Random = field(default_factory=lambda: random.Random(1))  # noqa: S311 - to do it again

    def set(self, weather: Weather) -> None:
        """From now on, for connections that are there and those that come."""
        self.links.run(self._set(weather))

    def cut(self) -> None:
        """Both ends of every connection are told by a reset; none comes until `set`."""
        self.links.run(self._cut())

    def half_open(self) -> int:
        """The far end goes and the near one is not told; how many connections."""
        return self.links.run(self._half_open())

    def vanish(self) -> int:
        """Who connected goes and the far end is not told, nor is it heard any more."""
        return self.links.run(self._vanish())

    async def _set(self, weather: Weather) -> None:
        self.weather = weather
        if not weather.hold_down:
            for pair in self._pairs:
                pair.deaf = False
                if pair.untold is not None:
                    _reset(pair.untold)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _cut(self) -> None:
        await self._set(Weather(refuse=True))
        for pair in list(self._pairs):
            _reset(pair.near)
            _reset(pair.far)

    async def _half_open(self) -> int:
        for pair in self._pairs:
            pair.untold = pair.near
            _reset(pair.far)
        return len(self._pairs)

    async def _vanish(self) -> int:
        gone = [pair for pair in self._pairs if pair.untold is None]
        for pair in gone:
            pair.untold, pair.deaf = pair.far, True
            _reset(pair.near)
        return len(gone)

    async def accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """A connection from its beginning to its end."""
        port = _port_of(writer)
        self.turned_away.add(port)
        if self.weather.refuse:
            _reset(writer)
            return
        try:
            far_reader, far = await self._open()
        except BaseException as error:
            _reset(writer)
            if isinstance(error, OSError):
                return
            raise
        self.turned_away.discard(port)
        self.connections += 1
        pair = _Pair(writer, far)
        self._pairs.add(pair)
        try:
            async with asyncio.TaskGroup() as tasks:
                for down in (False, True):
                    source, sink = (far_reader, writer) if down else (reader, far)
                    queue: Queue = asyncio.Queue(64)
                    pair.queues.append(queue)
                    tasks.create_task(self._read(pair, source, queue, down=down))
                    tasks.create_task(self._send(queue, sink, down=down))
        finally:
            self._pairs.discard(pair)
            for each in (writer, far):
                _reset(each)  # nothing, where it was closed before

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self.target, Path):
            return await asyncio.open_unix_connection(str(self.target))
        if not self.narrow:
            return await asyncio.open_connection(*self.target)
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NARROW_BYTES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, NARROW_SEGMENT)
        try:
            await asyncio.get_running_loop().sock_connect(sock, self.target)
        except BaseException:
            sock.close()
            raise
        return await asyncio.open_connection(sock=sock, limit=NARROW_BYTES)

    async def _read(
        self, pair: _Pair, reader: asyncio.StreamReader, queue: Queue, *, down: bool
    ) -> None:
        rewrite = self.rewrite() if self.rewrite is not None and down else None
        clock = asyncio.get_running_loop().time
        with contextlib.suppress(OSError):
            while chunk := await reader.read(CHUNK):
                sent = rewrite.feed(chunk) if rewrite is not None else chunk
                if sent:
                    await queue.put((clock() + self.weather.delay_s, sent))
                while down and (self.weather.unread or pair.deaf):
                    await self._changed.wait()
        if pair.untold is None:
            await queue.put((clock() + self.weather.delay_s, b""))
        elif pair.untold is (pair.far if down else pair.near):
            for each in pair.queues:
                await each.put((0.0, b""))

    async def _send(
        self,
        queue: Queue,
        writer: asyncio.StreamWriter,
        *,
        down: bool,
    ) -> None:
        """Send what is due; an empty chunk ends the stream and the connection."""
        clock = asyncio.get_running_loop().time
        while True:
            due_s, chunk = await queue.get()
            await asyncio.sleep(max(0.0, due_s - clock()))
            while self.weather.hold_down if down else self.weather.hold_up:
                await self._changed.wait()
            if not chunk:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()  # until all of it is sent
                return
            with contextlib.suppress(OSError):
                writer.write(self._spoilt(chunk) if down else chunk)
                await writer.drain()

    def _spoilt(self, chunk: bytes) -> bytes:
        if len(chunk) < CORRUPTED_FROM or self._chance.random() >= self.weather.corrupt:
            return chunk
        at = self._chance.randrange(len(chunk))
        self.corrupted += 1
        flipped = bytes([chunk[at] ^ (1 << self._chance.randrange(8))])
        return chunk[:at] + flipped + chunk[at + 1 :]


class Rewrite:
    """Changes a stream as it passes; this one leaves it as it is."""

    def feed(self, chunk: bytes) -> bytes:
        return chunk


def _port_of(writer: asyncio.StreamWriter) -> int:
    peer = writer.get_extra_info("peername")
    return int(peer[1]) if peer else 0


def _reset(writer: asyncio.StreamWriter) -> None:
    """End it by a reset: what is on its way is gone, and the peer is told so."""
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
    writer.transport.abort()


async def _quietly(accepting: Coroutine[Any, Any, None]) -> None:
    """Without its connection's errors, nor its end: streams' callback trips over both."""
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await accepting
    except* OSError:
        pass


class Links:
    """The thread in which links run."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="links")
        self._servers: list[asyncio.Server] = []
        self._accepting: set[asyncio.Task[None]] = set()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_LIMIT_S)
        self._loop.close()

    def add(self, target: Target, host: str = "127.0.0.1", port: int = 0) -> Link:
        """A link to ``target`` that listens there."""
        return self.run(self._add(target, host, port))

    def run(self, doing: Coroutine[Any, Any, T]) -> T:
        """Do it in the links' thread."""
        return asyncio.run_coroutine_threadsafe(doing, self._loop).result(CALL_LIMIT_S)

    async def _add(self, target: Target, host: str, port: int) -> Link:
        link = Link(target, self)

        async def accept(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._accepting.add(task)
            try:
                await _quietly(link.accept(reader, writer))
            finally:
                self._accepting.discard(task)

        server = await asyncio.start_server(accept, host, port, limit=CHUNK)
        self._servers.append(server)
        link.port = server.sockets[0].getsockname()[1]
        return link

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._accepting):
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await asyncio.sleep(0.05)  # what was aborted is closed in the loop's next turns


@contextlib.contextmanager
def weather(links: Sequence[Link], what: Weather) -> Generator[None]:
    """So it is at all these links until the block ends."""
    for link in links:
        link.set(what)
    try:
        yield
    finally:
        for link in links:
            link.set(CLEAR)


def rewrite(links: Sequence[Link], how: Callable[[], Rewrite] | None) -> None:
    """All that comes from now on; who is connected connects anew."""
    for link in links:
        link.rewrite = how
        link.cut()
        link.set(CLEAR)
