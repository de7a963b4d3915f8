"""Only a copy with the request's own key is read; any other descriptor is a miss."""

import pytest
from msgspec import structs
from tests.unit.decode_world import BLOCK, World, done, parts, plan, ref, slot, work

from kvtide.bus.messages import HandoverCopy
from kvtide.decode import events
from kvtide.kv import BlockKey, Located

FOREIGN = Located(BlockKey(b"X" * 16), slot(77), 5)


def read_blocks(world: World) -> list[int]:
    """The blocks that are being read from the pool; each must have its own key."""
    blocks: list[int] = []
    for read in world.reads:
        assert isinstance(read, events.ReadCopies)
        for copy in read.copies:
            keys = world.prompts[read.ref].keys
            assert copy.located.key == keys[copy.block]
            blocks.append(copy.block)
    return blocks


@pytest.mark.parametrize("block", [0, 1, 3])
def test_a_foreign_descriptor_in_reuse_is_never_read_but_computed(block: int) -> None:
    world = World()
    asked = work("a", 65, reuse=4, prefill=None)
    reuse = list(asked.reuse)
    reuse[block] = FOREIGN
    world.tell(events.WorkArrived(structs.replace(asked, reuse=tuple(reuse))))
    assert read_blocks(world) == [one for one in range(4) if one != block]
    world.run()
    assert world.tokens[ref("a")] == [7] * 4
    assert world.events[0].reused_tokens == 3 * BLOCK


def test_swapped_descriptors_in_reuse_are_never_read_but_computed() -> None:
    world = World()
    asked = work("a", 65, reuse=4, prefill=None)
    first, second, *rest = asked.reuse
    swapped = structs.replace(asked, reuse=(second, first, *rest))
    world.tell(events.WorkArrived(swapped))
    assert read_blocks(world) == [2, 3]
    world.run()
    assert world.tokens[ref("a")] == [7] * 4
    assert world.events[0].reused_tokens == 2 * BLOCK


def test_a_copy_for_the_block_that_has_no_key_is_never_read() -> None:
    world = World()
    asked = work("a", 40, reuse=2, prefill=None)  # 39 tokens of KV: 2 keys, 3 blocks
    reuse = (*asked.reuse, FOREIGN, FOREIGN)
    world.tell(events.WorkArrived(structs.replace(asked, reuse=reuse)))
    assert read_blocks(world) == [0, 1]
    world.run()
    assert world.tokens[ref("a")] == [7] * 4


def test_swapped_and_foreign_copies_in_a_plan_are_never_read_but_computed() -> None:
    world = World()
    asked = work("a", 65)
    world.tell(events.WorkArrived(asked))
    own = [Located(key, slot(30 + i), i) for i, key in enumerate(asked.keys)]
    planned = plan("a", 65)
    copies = (
        HandoverCopy(0, own[1]),
        HandoverCopy(1, own[0]),
        HandoverCopy(2, own[2]),
        HandoverCopy(3, FOREIGN),
        HandoverCopy(-1, own[3]),
    )
    world.say(structs.replace(planned, slots=(), copies=copies))
    assert read_blocks(world) == [2]
    world.say(done(planned, 0))
    world.run()
    assert world.tokens[ref("a")] == [7] * 4
    assert world.events[0].reused_tokens == 0  # prefill's plan begins at block 0


def test_a_block_with_a_foreign_copy_still_comes_from_its_slot() -> None:
    world = World()
    asked = work("a", 33, reuse=1)
    world.tell(events.WorkArrived(structs.replace(asked, reuse=(FOREIGN,))))
    planned = plan("a", 33)
    world.say(planned)
    for layer in range(2):
        world.say(parts(planned, layer, layer))
    world.say(done(planned))
    assert all(isinstance(read, events.ReadParts) for read in world.reads)
    world.run()
    assert world.tokens[ref("a")] == [7] * 4
