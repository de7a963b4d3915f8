"""Each eviction policy against a plain model of itself."""

from collections import deque

import pytest
from hypothesis import given, settings, strategies as st

from kvtide.store.eviction import NONE, Eviction, Lines, Policy
from kvtide.store.eviction.ghost import Ghost

SLOTS = 12


class Model:
    """Blocks in slots, as a list of what is known of each; slow and plain."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.order: list[int] = []
        self.uses: dict[int, int] = {}
        self.depth: dict[int, int] = {}
        self.small: deque[int] = deque()
        self.main: deque[int] = deque()
        self.ghost: list[int] = []
        self.in_main: set[int] = set()
        self.block: dict[int, int] = {}

    def begin(self, slot: int, block: int, depth: int) -> None:
        self.uses[slot], self.depth[slot] = 0, min(depth, 511)
        self.in_main.discard(slot)
        if block in self.ghost[-max(1, len(self.main)) :]:
            self.in_main.add(slot)
        self.ghost = [0 if each == block else each for each in self.ghost]

    def enter(self, slot: int) -> None:
        self.order.append(slot)
        (self.main if slot in self.in_main else self.small).append(slot)

    def leave(self, slot: int) -> None:
        self.order.remove(slot)
        (self.main if slot in self.in_main else self.small).remove(slot)

    def use(self, slot: int) -> None:
        limit = 3 if self.policy is Policy.S3_FIFO else 255
        self.uses[slot] = min(limit, self.uses[slot] + 1)
        if slot in self.order:
            self.order.remove(slot)
            self.order.append(slot)

    def next(self) -> int:
        if not self.order:
            return NONE
        if self.policy is Policy.S3_FIFO:
            return self._next_s3()
        return min(self.order, key=self._rank)

    def _rank(self, slot: int) -> tuple[int, int, int]:
        place = self.order.index(slot)
        match self.policy:
            case Policy.LFU:
                return (self.uses[slot], 0, place)
            case Policy.LENGTH_AWARE:
                return (self.uses[slot], -self.depth[slot], place)
            case _:
                return (0, 0, place)

    def _next_s3(self) -> int:
        while True:
            if self.small and (
                len(self.small) * 10 >= len(self.order) or not self.main
            ):
                slot = self.small[0]
                if self.uses[slot] < 2:
                    return slot
                self.uses[slot] = 0
                self.main.append(self.small.popleft())
                self.in_main.add(slot)
            elif self.uses[self.main[0]] == 0:
                return self.main[0]
            else:
                self.uses[self.main[0]] -= 1
                self.main.rotate(-1)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "use", "pin", "unpin", "free"]),
        st.integers(1, 30),
        st.integers(0, 600),
    ),
    max_size=150,
)


@pytest.mark.parametrize("policy", Policy)
@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_a_policy_is_its_model(
    policy: Policy, steps: list[tuple[str, int, int]]
) -> None:
    eviction, model = policy.make(), Model(policy)
    eviction.add_slots(SLOTS)
    line = eviction.add_line()
    slots: dict[int, int] = {}
    pinned: set[int] = set()
    for act, block, depth in steps:
        slot = slots.get(block)
        if act == "put" and slot is None:
            slot = _room(eviction, model, line, slots, pinned)
            if slot is None:
                continue
            slots[block] = model.block[slot] = slot
            model.block[slot] = block
            eviction.begin(slot, block, depth)
            model.begin(slot, block, depth)
            eviction.enter(line, slot)
            model.enter(slot)
        elif act == "use" and slot is not None:
            eviction.use(slot)
            model.use(slot)
        elif act == "pin" and slot is not None and slot not in pinned:
            eviction.leave(slot)
            model.leave(slot)
            pinned.add(slot)
        elif act == "unpin" and slot is not None and slot in pinned:
            eviction.enter(line, slot)
            model.enter(slot)
            pinned.discard(slot)
        elif act == "free" and slot is not None and slot not in pinned:
            eviction.leave(slot)
            model.leave(slot)
            del slots[block]
        assert eviction.next(line) == model.next()
        assert sorted(eviction.walk(line)) == sorted(model.order)
        assert all((each in eviction) == (each in model.order) for each in range(SLOTS))


def _room(
    eviction: Eviction,
    model: Model,
    line: int,
    slots: dict[int, int],
    pinned: set[int],
) -> int | None:
    free = set(range(SLOTS)) - set(slots.values())
    if free:
        return min(free)
    if len(pinned) == SLOTS:
        return None
    slot = model.next()
    assert eviction.next(line) == slot
    block = model.block[slot]
    if model.policy is Policy.S3_FIFO and slot not in model.in_main:
        model.ghost.append(block)
    eviction.evict(slot, block)
    model.leave(slot)
    del slots[block]
    return slot


@pytest.mark.parametrize("policy", Policy)
def test_lines_do_not_mix_and_are_used_again(policy: Policy) -> None:
    eviction = policy.make()
    eviction.add_slots(4)
    lines = [eviction.add_line() for _ in range(2)]
    for slot in range(4):
        eviction.begin(slot, slot + 1, slot)
        eviction.enter(lines[slot % 2], slot)
    assert [sorted(eviction.walk(line)) for line in lines] == [[0, 2], [1, 3]]
    for slot in (1, 3):
        eviction.leave(slot)
    assert eviction.next(lines[1]) == NONE
    eviction.drop_line(lines[1])
    again = eviction.add_line()
    eviction.enter(again, 3)
    assert (eviction.next(again), eviction.next(lines[0]) % 2) == (3, 0)


def test_a_walk_starts_with_what_goes_next() -> None:
    for policy in (Policy.LRU, Policy.LFU, Policy.LENGTH_AWARE):
        eviction = policy.make()
        eviction.add_slots(3)
        line = eviction.add_line()
        for slot in range(3):
            eviction.begin(slot, slot, slot)
            eviction.enter(line, slot)
        eviction.use(0)
        order = list(eviction.walk(line))
        assert order[0] == eviction.next(line)
        assert order[-1] == 0


def test_a_scan_does_not_push_out_what_s3_fifo_found_useful() -> None:
    def left(policy: Policy) -> int:
        eviction = policy.make()
        eviction.add_slots(100)
        line = eviction.add_line()
        for slot in range(100):
            eviction.begin(slot, slot + 1, 0)
            eviction.enter(line, slot)
            for _ in range(2):
                eviction.use(slot)
        kept = set(range(100))
        blocks = {slot: slot + 1 for slot in range(100)}
        for block in range(1000, 1400):
            slot = eviction.next(line)
            eviction.evict(slot, blocks[slot])
            kept.discard(slot)
            blocks[slot] = block
            eviction.begin(slot, block, 0)
            eviction.enter(line, slot)
        return len(kept)

    assert left(Policy.LRU) == 0
    assert left(Policy.S3_FIFO) > 60


def test_a_ghost_remembers_a_span_and_forgets() -> None:
    ghost = Ghost()
    ghost.make_room(1000)
    for identity in range(1, 501):
        ghost.add(identity)
    assert not ghost.take(9999, 500)
    assert not ghost.take(300, 200)
    known = sum(ghost.take(identity, 200) for identity in range(301, 501))
    assert known >= 190
    assert not any(ghost.take(identity, 500) for identity in range(301, 501))


def test_lines_keep_their_order() -> None:
    lines = Lines()
    lines.add_slots(5)
    line = lines.add_line()
    for slot in range(5):
        lines.append(line, slot)
    for slot in (0, 2, 4):
        lines.remove(slot)
    assert list(lines.walk(line)) == [1, 3]
    lines.append(line, 0)
    assert (lines.length(line), lines.oldest(line), lines.line_of(0)) == (3, 1, line)
    assert lines.line_of(2) == NONE
