"""How commands find the stores, and put questions to them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from kvtide.bus.interface import Bus, Incoming
from kvtide.bus.messages import (
    AnyMessage,
    Beat,
    BlockListing,
    BlockPage,
    BlocksDone,
    BlockSelector,
    Failure,
    ListBlocks,
    Message,
    PinBlocks,
    RemoveBlocks,
    UnpinBlocks,
)
from kvtide.bus.subjects import Hop
from kvtide.kv import BlockKey, ModelFacts, NodeId, Role
from kvtide.runtime import KvtideError

LISTEN_S = 1.2
"""Two beats of everybody."""

REQUEST_TIMEOUT_S = 5.0
BEATS = 4096


class NoStoreError(KvtideError):
    """No store answers, or not the one that was named."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Who beats: the stores, and the models that anybody serves, by name."""

    stores: tuple[Beat, ...]
    models: tuple[ModelFacts, ...]

    def named(self, node: str) -> Beat:
        """The store of that name.

        Raises:
            NoStoreError: it does not beat.
        """
        for beat in self.stores:
            if beat.node.node == node:
                return beat
        names = ", ".join(beat.node.node for beat in self.stores) or "none"
        raise NoStoreError(f"no store {node!r} is live; those that are: {names}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a change at one store; ``error`` if it did not answer with one."""

    node: NodeId
    matched: int = 0
    changed: int = 0
    refused: int = 0
    copies: int = 0
    error: str = ""


async def look_around(bus: Bus, node: str | None = None) -> Seen:
    """Listen for two beats.

    Raises:
        NoStoreError: no store beats, or not the one called ``node``.
    """
    seen = await listen(bus)
    if not seen.stores and node is None:
        raise NoStoreError(f"no store is live in cluster {bus.subjects.cluster!r}")
    return seen if node is None else Seen((seen.named(node),), seen.models)


async def listen(bus: Bus) -> Seen:
    """Whoever beats; maybe nobody."""
    beats: dict[NodeId, Beat] = {}

    async def heard(incoming: Incoming) -> None:
        beat = incoming.message
        if isinstance(beat, Beat) and (len(beats) < BEATS or beat.node.node in beats):
            beats[beat.node.node] = beat

    subscription = await bus.subscribe(bus.subjects.beats(), heard)
    try:
        await asyncio.sleep(LISTEN_S)
    finally:
        await subscription.close()
    stores = [beat for _, beat in sorted(beats.items()) if Role.STORE in beat.roles]
    models = {facts.name: facts for beat in beats.values() for facts in beat.models}
    return Seen(tuple(stores), tuple(models.values()))


async def ask_store(bus: Bus, node: NodeId, message: Message) -> AnyMessage:
    """One answer.

    Raises:
        NoStoreError: a failure, or no answer in time.
    """
    subject = bus.subjects.inbox(Role.STORE, node, Hop.QUERY)
    try:
        reply = await bus.request(subject, message, timeout_s=REQUEST_TIMEOUT_S)
    except (KvtideError, TimeoutError) as error:
        why = str(error) or "no answer"
        raise NoStoreError(f"store {node} does not answer: {why}") from error
    if isinstance(reply, Failure):
        raise NoStoreError(f"store {node} refuses: {reply.reason}")
    return reply


async def list_blocks(
    bus: Bus, stores: Sequence[NodeId], select: BlockSelector
) -> AsyncIterator[tuple[NodeId, BlockListing]]:
    """All blocks at these stores that fit, by store and key.

    Raises:
        NoStoreError: a store stops to answer.
    """
    for node in stores:
        after: BlockKey | None = None
        while True:
            page = await ask_store(bus, node, ListBlocks(select=select, after=after))
            if not isinstance(page, BlockPage):
                break
            for block in page.blocks:
                yield node, block
            after = page.next_key
            if after is None:
                break


async def keys_between(
    bus: Bus, stores: Sequence[NodeId], first: BlockKey, last: BlockKey, limit: int
) -> set[BlockKey]:
    """At most ``limit`` keys of blocks at these stores, both ends included.

    Raises:
        NoStoreError: a store stops to answer.
    """
    found: set[BlockKey] = set()
    for node in stores:
        # a page begins after a key: the first one is asked for by name
        exact = ListBlocks(select=BlockSelector(keys=(first,)))
        question, after = exact, first
        while len(found) < limit:
            page = await ask_store(bus, node, question)
            if not isinstance(page, BlockPage):
                break
            keys = [block.located.key for block in page.blocks]
            found.update(key for key in keys if key <= last)
            if question is not exact:
                if page.next_key is None or page.next_key >= last:
                    break
                after = page.next_key
            question = ListBlocks(select=BlockSelector(), after=after, limit=limit)
    return set(sorted(found)[:limit])


Change = PinBlocks | UnpinBlocks | RemoveBlocks


async def change_blocks(bus: Bus, node: NodeId, change: Change) -> Outcome:
    """Have one store make a change, page by page; never raises for a store."""
    total = Outcome(node)
    after: BlockKey | None = None
    while True:
        try:
            done = await ask_store(bus, node, _page(change, after))
        except NoStoreError as error:
            return replace(total, error=str(error))
        if not isinstance(done, BlocksDone):
            return replace(total, error=f"it answered {type(done).__name__}")
        total = Outcome(
            node,
            total.matched + done.matched,
            total.changed + done.changed,
            total.refused + done.refused,
            total.copies + done.copies,
        )
        after = done.next_key
        if after is None:
            return total


def _page(change: Change, after: BlockKey | None) -> Change:
    match change:
        case PinBlocks(select=select, hard=hard, seconds=seconds):
            return PinBlocks(select=select, hard=hard, seconds=seconds, after=after)
        case UnpinBlocks(select=select):
            return UnpinBlocks(select=select, after=after)
        case RemoveBlocks(select=select):
            return RemoveBlocks(select=select, after=after)
