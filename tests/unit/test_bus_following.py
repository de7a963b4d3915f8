"""A follower knows in the end exactly what each store has, whatever was lost."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from kvtide.bus import BlockFollowing, FollowTimes, Gone, GoneReason, Joined, Restarted
from kvtide.bus.following import Apply, Exact, FollowCommand, Forget, Pull
from kvtide.bus.messages import (
    Beat,
    BlocksChanged,
    Dropped,
    NodeState,
    SnapshotPage,
    StoreLoad,
)
from kvtide.bus.roster import Changed, Member
from kvtide.kv import BlockKey, Located, NodeId, NodeRef, Role, SlotRef, Tier

STORE = NodeId("store-0")
OWN = NodeId("conductor-0")
TIMES = FollowTimes(page_limit=3, kept_limit=64)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def located(number: int, generation: int, epoch: int = 1) -> Located:
    slot = SlotRef(STORE, epoch, Tier.DRAM, 0, number * 4096, 4096, generation)
    return Located(key(number), slot, generation)


@dataclass
class TrueStore:
    """A store as its followers know it: numbered changes and pages."""

    epoch: int = 1
    seq: int = 0
    blocks: dict[BlockKey, Located] = field(default_factory=dict[BlockKey, Located])
    generation: int = 0

    @property
    def ref(self) -> NodeRef:
        return NodeRef(STORE, self.epoch)

    def change(self, puts: set[int], drops: set[int]) -> BlocksChanged:
        self.seq += 1
        dropped = [
            Dropped(k, self.blocks.pop(k).slot.generation)
            for k in (key(number) for number in sorted(drops))
            if k in self.blocks
        ]
        added: list[Located] = []
        for number in sorted(puts):
            self.generation += 1
            copy = located(number, self.generation, self.epoch)
            old = self.blocks.get(copy.key)
            if old is not None:
                dropped.append(Dropped(old.key, old.slot.generation))
            self.blocks[copy.key] = copy
            added.append(copy)
        return BlocksChanged(
            store=self.ref, seq=self.seq, added=tuple(added), dropped=tuple(dropped)
        )

    def page(self, pull: Pull) -> SnapshotPage:
        after = pull.after
        keys = sorted(k for k in self.blocks if after is None or k > after)
        chosen = keys[: pull.limit]
        return SnapshotPage(
            store=self.ref,
            seq=self.seq,
            located=tuple(self.blocks[k] for k in chosen),
            next_key=chosen[-1] if len(keys) > len(chosen) else None,
        )

    def member(self) -> Member:
        beat = Beat(
            node=self.ref,
            roles=(Role.STORE,),
            seq=1,
            host="",
            state=NodeState.READY,
            steps=0,
            load=(StoreLoad(seq=self.seq),),
        )
        return Member(beat, 0.0, 0.0)


@dataclass
class Sink:
    """What a follower told."""

    blocks: dict[BlockKey, Located] = field(default_factory=dict[BlockKey, Located])
    exact: bool = False
    pulls: list[Pull] = field(default_factory=list[Pull])

    def do(self, commands: list[FollowCommand]) -> None:
        for command in commands:
            match command:
                case Apply(_, added, dropped):
                    for drop in dropped:
                        known = self.blocks.get(drop.key)
                        if known and known.slot.generation == drop.generation:
                            del self.blocks[drop.key]
                    self.blocks.update({copy.key: copy for copy in added})
                case Forget():
                    self.blocks.clear()
                case Exact(_, exact):
                    self.exact = exact
                case Pull():
                    self.pulls.append(command)


class World:
    """One store, one follower, and a bad network between them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - seeded
        self.store = TrueStore()
        self.following = BlockFollowing(OWN, TIMES)
        self.sink = Sink()
        self.now_s = 0.0
        self.flying: list[BlocksChanged] = []

    def join(self) -> None:
        event = Joined(self.store.member())
        self.sink.do(self.following.member(event, self.now_s))

    def change(self, loss: float, duplicate: float) -> None:
        numbers = range(12)
        puts = set(self.random.sample(numbers, self.random.randint(0, 3)))
        drops = set(self.random.sample(numbers, self.random.randint(0, 3)))
        change = self.store.change(puts, drops - puts)
        if self.random.random() >= loss:
            self.flying.append(change)
        if self.random.random() < duplicate:
            self.flying.append(change)

    def deliver(self, *, in_order: bool) -> None:
        if not self.flying:
            return
        index = 0 if in_order else self.random.randrange(len(self.flying))
        change = self.flying.pop(index)
        self.sink.do(self.following.changed(change, self.now_s))

    def answer(self, loss: float) -> None:
        if not self.sink.pulls:
            return
        pull = self.sink.pulls.pop(self.random.randrange(len(self.sink.pulls)))
        if self.random.random() < loss:
            self.sink.do(self.following.failed(pull.number, self.now_s))
            return
        page = self.store.page(pull)
        self.sink.do(self.following.page(pull.number, page, self.now_s))

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.sink.do(self.following.tick(self.now_s))

    def beat(self) -> None:
        member = self.store.member()
        self.sink.do(self.following.member(Changed(member, member), self.now_s))

    def restart(self) -> None:
        before = self.store.member()
        self.store = TrueStore(epoch=self.store.epoch + 1)
        event = Restarted(before, self.store.member())
        self.sink.do(self.following.member(event, self.now_s))

    def settle(self) -> None:
        """No more changes, nothing more lost: how it must end."""
        for _ in range(400):
            while self.flying:
                self.deliver(in_order=True)
            self.answer(loss=0.0)
            self.beat()
            self.tick(0.1)


STEPS = ("change", "change", "deliver", "deliver", "answer", "answer", "tick", "beat")


@given(
    seed=st.integers(0, 2**32),
    steps=st.integers(0, 300),
    restarts=st.booleans(),
    loss=st.sampled_from([0.0, 0.02, 0.5]),
    duplicate=st.sampled_from([0.0, 0.3]),
    in_order=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_it_converges_to_the_truth(
    seed: int,
    steps: int,
    restarts: bool,
    loss: float,
    duplicate: float,
    in_order: bool,
) -> None:
    world = World(seed)
    for _ in range(5):
        world.change(0.0, 0.0)
    world.flying.clear()
    world.join()
    for _ in range(steps):
        match world.random.choice(STEPS):
            case "change":
                world.change(loss, duplicate)
            case "deliver":
                world.deliver(in_order=in_order)
            case "answer":
                world.answer(loss)
            case "beat":
                world.beat()
            case _:
                world.tick(0.05)
        if restarts and world.random.random() < 0.01:
            world.restart()
        if world.sink.exact and not world.flying and loss == 0 and in_order:
            assert world.sink.blocks == world.store.blocks
    world.settle()
    assert world.sink.exact
    assert world.sink.blocks == world.store.blocks


def followed() -> World:
    """A world whose follower knows all of a store with five blocks."""
    world = World(seed=1)
    world.store.change({1, 2, 3, 4, 5}, set())
    world.join()
    world.settle()
    assert world.sink.exact
    return world


def test_pages_are_pulled_one_after_another_until_the_last() -> None:
    world = World(seed=1)
    world.store.change({1, 2, 3, 4, 5}, set())
    world.join()
    world.tick(1.0)
    (first,) = world.sink.pulls
    assert first == Pull(1, world.store.ref, None, 3)
    world.answer(loss=0.0)
    assert world.sink.pulls == [Pull(2, world.store.ref, key(3), 3)]
    world.answer(loss=0.0)
    assert world.sink.pulls == []
    assert world.sink.exact


def test_a_change_between_two_pages_is_applied_to_the_older_one_only() -> None:
    world = World(seed=1)
    world.store.change({1, 2, 3, 4, 5}, set())
    world.join()
    world.tick(1.0)
    world.answer(loss=0.0)
    change = world.store.change({9}, {1, 5})
    world.sink.do(world.following.changed(change, world.now_s))
    world.answer(loss=0.0)
    assert world.sink.exact
    assert world.sink.blocks == world.store.blocks


def test_a_change_that_a_page_knows_of_may_be_late() -> None:
    world = World(seed=1)
    world.store.change({1, 2, 3, 4, 5}, set())
    world.join()
    world.tick(1.0)
    world.answer(loss=0.0)
    late = world.store.change({1}, {5})
    world.answer(loss=0.0)
    assert not world.sink.exact
    world.tick(TIMES.straggler_s / 2)
    world.sink.do(world.following.changed(late, world.now_s))
    assert world.sink.exact
    assert world.sink.blocks == world.store.blocks


def test_a_change_that_a_page_knows_of_and_never_comes_is_pulled() -> None:
    world = World(seed=1)
    world.store.change({1, 2, 3, 4, 5}, set())
    world.join()
    world.tick(1.0)
    world.answer(loss=0.0)
    world.store.change({1}, {5})
    world.answer(loss=0.0)
    world.tick(TIMES.straggler_s)
    assert not world.sink.exact
    world.settle()
    assert world.sink.exact
    assert world.sink.blocks == world.store.blocks


def test_a_gap_makes_it_inexact_and_pulls() -> None:
    world = followed()
    world.store.change({6}, set())
    second = world.store.change({7}, set())
    world.sink.do(world.following.changed(second, world.now_s))
    assert not world.sink.exact
    world.settle()
    assert world.sink.blocks == world.store.blocks


def test_a_lost_last_change_is_missed_by_the_beat() -> None:
    world = followed()
    world.store.change({6}, set())
    world.beat()
    world.tick(0.1)
    assert world.sink.exact, "it may only be late"
    world.tick(TIMES.behind_s)
    assert not world.sink.exact
    world.settle()
    assert world.sink.blocks == world.store.blocks


def test_after_a_loss_the_beat_is_believed_at_once() -> None:
    world = followed()
    world.store.change({6}, set())
    world.following.lost(world.now_s)
    world.beat()
    world.tick(0.0)
    assert not world.sink.exact


def test_a_page_of_another_life_is_not_used() -> None:
    world = World(seed=1)
    world.join()
    world.tick(1.0)
    (pull,) = world.sink.pulls
    foreign = SnapshotPage(
        store=NodeRef(STORE, 9), seq=4, located=(located(1, 1, 9),), next_key=None
    )
    world.sink.do(world.following.page(pull.number, foreign, world.now_s))
    assert world.sink.blocks == {}
    assert not world.sink.exact


def test_a_page_that_does_not_move_on_is_not_believed() -> None:
    world = World(seed=1)
    world.store.change({1, 2, 3, 4, 5}, set())
    world.join()
    world.tick(1.0)
    world.answer(loss=0.0)
    (pull,) = world.sink.pulls
    stuck = SnapshotPage(store=world.store.ref, seq=1, located=(), next_key=key(3))
    world.sink.do(world.following.page(pull.number, stuck, world.now_s))
    assert world.sink.pulls == [pull], "no further page was asked for"
    assert not world.sink.exact


def test_a_store_that_goes_is_forgotten_and_its_page_too() -> None:
    world = World(seed=1)
    world.store.change({1}, set())
    world.join()
    world.tick(1.0)
    (pull,) = world.sink.pulls
    gone = Gone(world.store.member(), GoneReason.SILENT)
    world.sink.do(world.following.member(gone, world.now_s))
    page = world.store.page(pull)
    assert world.following.page(pull.number, page, world.now_s) == []
    assert world.following.changed(world.store.change({2}, set()), 0.0) == []
    assert world.sink.blocks == {}


def test_few_pulls_are_in_flight() -> None:
    following = BlockFollowing(OWN, FollowTimes(pulls=4))
    commands: list[FollowCommand] = []
    for index in range(10):
        store = TrueStore()
        beat = store.member().beat
        ref = NodeRef(NodeId(f"store-{index}"), 1)
        member = Member(
            Beat(
                node=ref,
                roles=beat.roles,
                seq=1,
                host="",
                state=beat.state,
                steps=0,
                load=(),
            ),
            0.0,
            0.0,
        )
        commands += following.member(Joined(member), 0.0)
    commands += following.tick(1.0)
    pulls = [c for c in commands if isinstance(c, Pull)]
    assert len(pulls) == 4
    following.failed(pulls[0].number, 1.0)
    assert len([c for c in following.tick(1.0) if isinstance(c, Pull)]) <= 1


@pytest.mark.parametrize("failures", [1, 5, 50])
def test_failing_pulls_come_less_often_but_for_ever(failures: int) -> None:
    world = World(seed=1)
    world.join()
    done = 0
    while done < failures:
        world.tick(6.0)
        assert len(world.sink.pulls) == 1
        pull = world.sink.pulls.pop()
        world.sink.do(world.following.failed(pull.number, world.now_s))
        done += 1
    world.settle()
    assert world.sink.exact
