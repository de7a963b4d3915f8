"""Tells the cluster at once which process has died, instead of leaving it to silence.

Who starts processes knows of their end within milliseconds; others would wait for beats
that do not come. The life that is over is named by its epoch, so that a late word harms
no later one.
"""

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from kvtide.bus.errors import BusError
from kvtide.bus.interface import Bus
from kvtide.bus.messages import Goodbye
from kvtide.kv import NodeId, NodeRef
from kvtide.runtime import Clock, KvtideError

WAITING = 256
AGAIN_S = 1.0

OpenBus = Callable[[], AbstractAsyncContextManager[Bus]]


class Obituaries:
    """Kept while processes run. ``ended`` may be called before ``send`` has connected."""

    def __init__(self, state_dir: Path, open_bus: OpenBus, clock: Clock) -> None:
        """Epochs are read from the state folder, where every node keeps its own."""
        self._folder = state_dir / "epochs"
        self._open_bus = open_bus
        self._clock = clock
        self._ended: asyncio.Queue[NodeRef] = asyncio.Queue(WAITING)

    def ended(self, name: str) -> None:
        """The process of this name is over; call it before another one is started."""
        with contextlib.suppress(OSError, ValueError, asyncio.QueueFull):
            epoch = int((self._folder / name).read_text(encoding="ascii"))
            self._ended.put_nowait(NodeRef(NodeId(name), epoch))

    async def send(self) -> None:
        """Tell for ever. Without a bus the others find out by themselves."""
        while True:
            with contextlib.suppress(KvtideError, OSError, TimeoutError):
                async with self._open_bus() as bus:
                    await self._send_on(bus)
            await self._clock.sleep(AGAIN_S)

    async def _send_on(self, bus: Bus) -> None:
        while True:
            ref = await self._ended.get()
            with contextlib.suppress(BusError):
                subject = bus.subjects.goodbye(ref.node)
                await bus.publish(subject, Goodbye(node=ref))
