"""A reused prefix comes layer by layer, and each layer is computed as soon as it is there."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import msgspec
import pytest
from tests.unit.shell_world import (
    Model,
    Pool,
    Put,
    Runner,
    prefill_work,
    slot,
    until,
    world_of,
)
from torch import Tensor

from kvtide.bus import Hop
from kvtide.bus.messages import (
    Ack,
    HandoverTaken,
    PrefillDone,
    PrefillWork,
    PutBlock,
    PutSlot,
)
from kvtide.engine.runner import Chunk
from kvtide.kv import Lease, Located, RequestId, Role, Tier
from kvtide.pool import MissReason, ReadOutcome
from kvtide.prefill import layered_load


@dataclass
class Told(Runner):
    """Says when the first layer is computed."""

    loop: asyncio.AbstractEventLoop | None = None
    first_made: asyncio.Event = field(default_factory=asyncio.Event)
    starts: list[int] = field(default_factory=list[int])

    def step(
        self,
        chunks: Sequence[Chunk],
        on_layer: Callable[[int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[Tensor | None]:
        self.starts.append(chunks[0].start)

        def told(layer: int) -> None:
            assert on_layer is not None
            on_layer(layer)
            if self.loop is not None:
                self.loop.call_soon_threadsafe(self.first_made.set)

        return super().step(chunks, told, cancelled)


@dataclass
class Finished(Runner):
    """Says when a step begins, and remembers where those started that came to an end."""

    loop: asyncio.AbstractEventLoop | None = None
    first_begun: asyncio.Event = field(default_factory=asyncio.Event)
    starts: list[int] = field(default_factory=list[int])
    finished: list[int] = field(default_factory=list[int])

    def step(
        self,
        chunks: Sequence[Chunk],
        on_layer: Callable[[int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[Tensor | None]:
        self.starts.append(chunks[0].start)
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.first_begun.set)
        made = super().step(chunks, on_layer, cancelled)
        self.finished.append(chunks[0].start)
        return made


@dataclass
class SlowPool(Pool):
    """Gives the second layer only after the first one was computed."""

    first_made: asyncio.Event = field(default_factory=asyncio.Event)
    bad_layer: int | None = None
    layers: list[int] = field(default_factory=list[int])

    async def read_headers(
        self, located: Sequence[Located], *rest: object, **options: object
    ) -> list[None]:
        del rest, options
        return [cast("None", object()) for _ in located]

    async def read_blocks(
        self, located: Sequence[Located], *rest: object, **options: object
    ) -> list[ReadOutcome]:
        parts = options["parts"]
        assert isinstance(parts, range)
        layer = parts.start // 2
        assert len(parts) == 2
        self.layers.append(layer)
        if layer > 0:
            await self.first_made.wait()
        if layer == self.bad_layer:
            miss = ReadOutcome(MissReason.CORRUPT, detail="flipped")
            return [ReadOutcome(), *[miss] * (len(located) - 1)]
        return [ReadOutcome() for _ in located]


@pytest.mark.parametrize("bad_layer", [None, 1])
async def test_the_next_layer_loads_while_one_is_computed(
    monkeypatch: pytest.MonkeyPatch, bad_layer: int | None
) -> None:
    monkeypatch.setattr(layered_load, "READ_BYTES", 1)
    runner = Told(loop=asyncio.get_running_loop())
    pool = SlowPool(first_made=runner.first_made, bad_layer=bad_layer)
    async with world_of(Role.PREFILL, pool, Model(runner=runner)) as world:
        await world.ask(prefill_work("a", 40, reuse=2))
        done = await world.told("a")  # it would never come if all was loaded first
        assert isinstance(done, PrefillDone)
        assert pool.layers == [0, 1]
        if bad_layer is None:
            assert runner.starts == [32]
            assert (done.reused_tokens, done.computed_tokens) == (32, 7)
        else:  # the second block is computed, and what depends on it again
            assert runner.starts == [32, 16]
            assert (done.reused_tokens, done.computed_tokens) == (16, 23)
        taken = HandoverTaken(request=RequestId("a"), attempt=1)
        assert isinstance(await world.send(Hop.CONTROL, taken), Ack)
        await until(lambda: all(run.closed for run in world.model.runs), "runs end")


def on_ssd(work: PrefillWork) -> PrefillWork:
    """The same, with all that is reused on an SSD."""
    reuse = tuple(
        msgspec.structs.replace(
            each, slot=msgspec.structs.replace(each.slot, tier=Tier.SSD)
        )
        for each in work.reuse
    )
    return msgspec.structs.replace(work, reuse=reuse)


@dataclass
class SsdPool(SlowPool):
    """Has room to stage all, or one copy of each call; reads what it holds staged."""

    room: bool = True
    holds: int = 0

    @asynccontextmanager
    async def staged(
        self, located: Sequence[Located], *, timeout_s: float
    ) -> AsyncGenerator[Sequence[Located | None]]:
        assert timeout_s > 0
        self.holds += 1
        there = [
            msgspec.structs.replace(
                each, slot=msgspec.structs.replace(each.slot, tier=Tier.DRAM)
            )
            for each in located
        ]
        yield there if self.room else [*there[:1], *[None] * (len(there) - 1)]
        self.holds -= 1

    async def read_blocks(
        self, located: Sequence[Located], *rest: object, **options: object
    ) -> list[ReadOutcome]:
        tiers = {each.slot.tier for each in located}
        if self.room:
            assert (self.holds, tiers) == (1, {Tier.DRAM})
            return await super().read_blocks(located, *rest, **options)
        assert (self.holds, tiers, options["parts"]) == (0, {Tier.SSD}, range(4))
        return [ReadOutcome() for _ in located]


@pytest.mark.parametrize("room", [True, False])
async def test_a_prefix_on_an_ssd_is_staged_once_and_loaded_beside_the_compute(
    monkeypatch: pytest.MonkeyPatch, *, room: bool
) -> None:
    monkeypatch.setattr(layered_load, "READ_BYTES", 1)
    runner = Told(loop=asyncio.get_running_loop())
    pool = SsdPool(first_made=runner.first_made, room=room)
    async with world_of(Role.PREFILL, pool, Model(runner=runner)) as world:
        await world.ask(on_ssd(prefill_work("a", 40, reuse=2)))
        done = await world.told("a")
        assert isinstance(done, PrefillDone)
        assert (done.reused_tokens, done.computed_tokens) == (32, 7)
        assert runner.starts == [32]
        assert pool.layers == ([0, 1] if room else [])
        assert pool.holds == 0
        taken = HandoverTaken(request=RequestId("a"), attempt=1)
        assert isinstance(await world.send(Hop.CONTROL, taken), Ack)


@dataclass
class GonePool(Pool):
    """Told at the put that a block is there; when it is read, it is not any more."""

    ask: asyncio.Event = field(default_factory=asyncio.Event)

    async def begin(
        self, lease: Lease, tags: object, layout: object, blocks: Sequence[PutBlock]
    ) -> Put:
        put = await super().begin(lease, tags, layout, blocks)
        key = blocks[0].key
        assert key is not None
        here = PutSlot(None, Located(key, slot(0), 0))
        return Put(self, (here, *put.slots[1:]))

    async def read_headers(
        self, located: Sequence[Located], *rest: object, **options: object
    ) -> list[None]:
        await self.ask.wait()
        return await super().read_headers(located, *rest, **options)


async def test_no_step_goes_on_without_a_copy_that_was_promised() -> None:
    """What it computed would be written and announced as the blocks that follow."""
    pool = GonePool()
    runner = Finished(loop=asyncio.get_running_loop(), first_begun=pool.ask)
    async with world_of(Role.PREFILL, pool, Model(runner=runner)) as world:
        await world.ask(prefill_work("a", 40))
        done = await world.told("a")
        assert isinstance(done, PrefillDone)
        assert (done.reused_tokens, done.computed_tokens) == (0, 39)
        assert runner.starts == [16, 0]
        assert runner.finished == [0]
        taken = HandoverTaken(request=RequestId("a"), attempt=1)
        assert isinstance(await world.send(Hop.CONTROL, taken), Ack)
