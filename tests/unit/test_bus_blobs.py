"""Large bodies: offered once, for a while, within bounds; fetched whole or not at all."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from kvtide.bus import BusLimits, WireError
from kvtide.bus.blobs import BlobShelf, fetch
from kvtide.bus.codec import BlobRef
from kvtide.runtime import LimitError, ManualClock
from kvtide.transfer import MemoryEndpoint, MemoryFabric

LIMITS = BusLimits(blob_bytes=1000, shelf_bytes=2500, shelf_count=4, blob_ttl_s=60.0)


@dataclass
class Pair:
    """One who offers, and one who fetches."""

    clock: ManualClock
    sender: MemoryEndpoint
    receiver: MemoryEndpoint
    shelf: BlobShelf

    async def fetch(self, ref: BlobRef) -> bytes:
        return bytes(await fetch(self.receiver, ref, LIMITS, self.clock))


@asynccontextmanager
async def pair() -> AsyncGenerator[Pair]:
    clock = ManualClock()
    fabric = MemoryFabric(clock)
    async with (
        fabric.endpoint(node="sender", epoch=1) as sender,
        fabric.endpoint(node="receiver", epoch=1) as receiver,
    ):
        yield Pair(clock, sender, receiver, BlobShelf(sender, clock, LIMITS))


async def test_what_is_offered_can_be_fetched_again_and_again() -> None:
    async with pair() as two:
        ref = await two.shelf.put(b"x" * 900)
        assert await two.fetch(ref) == b"x" * 900
        assert await two.fetch(ref) == b"x" * 900


async def test_equal_bodies_lie_there_once_and_last_from_the_newest_offer() -> None:
    async with pair() as two:
        await two.shelf.put(b"x" * 900)
        await two.clock.advance(40.0)
        ref = await two.shelf.put(b"x" * 900)
        assert (len(two.shelf), two.shelf.nbytes) == (1, 900)
        await two.clock.advance(40.0)
        await two.shelf.sweep()
        assert await two.fetch(ref) == b"x" * 900


async def test_a_body_that_was_asked_with_goes_when_all_replies_are_there() -> None:
    async with pair() as two:
        first = await two.shelf.put(b"x" * 900, asked=True)
        second = await two.shelf.put(b"x" * 900, asked=True)
        two.shelf.answered(first)
        await two.shelf.sweep()
        assert await two.fetch(second) == b"x" * 900
        two.shelf.answered(second)
        await two.shelf.sweep()
        assert (len(two.shelf), two.shelf.nbytes) == (0, 0)
        two.shelf.answered(second)


async def test_a_body_that_was_told_too_stays_for_others() -> None:
    async with pair() as two:
        await two.shelf.put(b"x" * 900)
        asked = await two.shelf.put(b"x" * 900, asked=True)
        two.shelf.answered(asked)
        await two.shelf.sweep()
        assert await two.fetch(asked) == b"x" * 900


async def test_after_its_time_it_is_gone() -> None:
    async with pair() as two:
        ref = await two.shelf.put(b"x" * 900)
        await two.clock.advance(61.0)
        await two.shelf.sweep()
        assert (len(two.shelf), two.shelf.nbytes) == (0, 0)
        with pytest.raises(WireError) as caught:
            await two.fetch(ref)
        assert caught.value.reason == "blob"


@pytest.mark.parametrize(
    ("sizes", "limit"),
    [
        ([1001], "blob_bytes"),
        ([1000, 999, 998], "shelf_bytes"),
        ([1, 2, 3, 4, 5], "shelf_count"),
    ],
)
async def test_the_shelf_is_bounded_and_has_room_again_later(
    sizes: list[int], limit: str
) -> None:
    async with pair() as two:
        for size in sizes[:-1]:
            await two.shelf.put(b"x" * size)
        with pytest.raises(LimitError) as caught:
            await two.shelf.put(b"x" * sizes[-1])
        assert caught.value.limit == limit
        await two.clock.advance(61.0)
        assert await two.fetch(await two.shelf.put(b"small")) == b"small"


async def test_a_reference_that_promises_too_much_is_not_followed() -> None:
    async with pair() as two:
        ref = await two.shelf.put(b"x" * 900)
        for bad in (
            replace_ref(ref, length=1001),
            replace_ref(ref, length=901),
            replace_ref(ref, length=0),
            replace_ref(ref, length=-1),
            replace_ref(ref, digest=b"short"),
        ):
            with pytest.raises(WireError) as caught:
                await two.fetch(bad)
            assert caught.value.reason == "blob"


async def test_a_forged_capability_or_a_dead_sender_is_a_drop() -> None:
    async with pair() as two:
        ref = await two.shelf.put(b"x" * 900)
        handle = replace(ref.handle, capability=bytes(len(ref.handle.capability)))
        forged = BlobRef(
            address=ref.address, handle=handle, length=ref.length, blake3=ref.blake3
        )
        with pytest.raises(WireError):
            await two.fetch(forged)
        two.sender.kill()
        with pytest.raises(WireError):
            await two.fetch(ref)


def replace_ref(
    ref: BlobRef, *, length: int | None = None, digest: bytes | None = None
) -> BlobRef:
    return BlobRef(
        address=ref.address,
        handle=ref.handle,
        length=ref.length if length is None else length,
        blake3=ref.blake3 if digest is None else digest,
    )


async def test_clearing_takes_everything_away() -> None:
    async with pair() as two:
        ref = await two.shelf.put(b"x" * 900)
        await two.shelf.clear()
        assert len(two.shelf) == 0
        with pytest.raises(WireError):
            await two.fetch(ref)
