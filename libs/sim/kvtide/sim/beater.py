"""Beats in virtual time."""

from typing import Protocol

from kvtide.bus.beater import Pulse
from kvtide.bus.messages import Message
from kvtide.sim.kernel import Kernel, Life, Promise


class Publisher(Protocol):
    """What a beater needs of a bus."""

    async def publish(self, subject: str, message: Message) -> None:
        """As ``Bus.publish``."""
        ...


class SimBeater:
    """See ``kvtide.bus.beater.Beater``: the same times, without a thread."""

    def __init__(self, kernel: Kernel, life: Life, bus: Publisher) -> None:
        """Nothing is sent before ``start``."""
        self._kernel = kernel
        self._life = life
        self._bus = bus
        self._woken: Promise[None] = Promise(kernel)

    async def start(self, pulse: Pulse) -> None:
        """See ``Beater.start``."""
        self._kernel.spawn(self._beat(pulse), self._life)

    def poke(self) -> None:
        """See ``Beater.poke``."""
        self._woken.set(None)

    async def close(self) -> None:
        """Nothing to do: beats end with their life."""

    async def _beat(self, pulse: Pulse) -> None:
        times, kernel = pulse.times, self._kernel
        last_s = kernel.now_s
        while True:
            if kernel.now_s - last_s > times.roster.dead_after_s:
                await pulse.fence()
            last_s = kernel.now_s
            self._woken = Promise(kernel)
            node = pulse.identity.current
            beat = pulse.vitals.beat(node)
            await self._bus.publish(pulse.subjects.beat(node.node), beat)
            await kernel.sleep(times.beat_gap_s, self._life)
            woken = self._woken
            rest_s = times.beat_s - times.beat_gap_s
            kernel.at(rest_s, lambda woken=woken: woken.set(None), self._life)
            await woken
