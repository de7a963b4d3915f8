"""The model of the store's machine, with S3-FIFO and people who keep and remove."""

from dataclasses import replace

from hypothesis import settings, strategies as st
from hypothesis.stateful import invariant, rule
from tests.unit.store_driver import CONDUCTOR, STORE, tags
from tests.unit.test_store_machine_properties import KEYS, RULES, StoreModel

from kvtide.bus.messages import (
    BlockPage,
    BlocksDone,
    BlockSelector,
    ListBlocks,
    PinBlocks,
    RemoveBlocks,
    UnpinBlocks,
)
from kvtide.kv import BlockKey
from kvtide.store.eviction import Policy
from kvtide.store.machine import StoreMachine
from kvtide.store.slot_states import SlotState, TableRules


def by_keys(keys: list[BlockKey]) -> BlockSelector:
    return BlockSelector(keys=tuple(keys))


SELECTORS = st.one_of(
    st.lists(st.sampled_from(KEYS)).map(by_keys),
    st.just(BlockSelector(model=tags(1000).model)),
    st.just(BlockSelector(tenant=bytes(16))),
)


class PeopleModel(StoreModel):
    def __init__(self) -> None:
        super().__init__()
        rules = replace(RULES, table=TableRules(Policy.S3_FIFO, hard_pin_share=0.3))
        self.machine = StoreMachine(STORE, rules, back=self.back)

    @rule(select=SELECTORS, hard=st.booleans(), seconds=st.sampled_from([2, 50]))
    def pin(self, select: BlockSelector, hard: bool, seconds: float) -> None:
        answer = self.answer(PinBlocks(select=select, hard=hard, seconds=seconds))
        assert isinstance(answer, BlocksDone)
        assert answer.changed + answer.refused <= answer.matched

    @rule(select=SELECTORS)
    def unpin(self, select: BlockSelector) -> None:
        assert isinstance(self.answer(UnpinBlocks(select=select)), BlocksDone)

    @rule(select=SELECTORS)
    def remove(self, select: BlockSelector) -> None:
        before = set(self.machine.inventory.index.page(None, 1000))
        answer = self.answer(RemoveBlocks(select=select))
        assert isinstance(answer, BlocksDone)
        after = set(self.machine.inventory.index.page(None, 1000))
        assert len(before - after) == answer.changed
        if select.keys is not None:
            assert not after & set(select.keys)

    @rule(keys=st.sets(st.sampled_from(KEYS)), extra=st.booleans())
    def mark(self, keys: set[BlockKey], extra: bool) -> None:
        for key in keys:
            slot = self.machine.inventory.index.get(key)
            if slot is not None:
                self.machine.inventory.mark_extra(slot, extra=extra)

    @rule()
    def list_all(self) -> None:
        page = self.answer(ListBlocks(select=BlockSelector()), CONDUCTOR)
        assert isinstance(page, BlockPage)
        keys = [block.located.key for block in page.blocks]
        assert keys == self.machine.inventory.index.page(None, 1000)

    @invariant()
    def hard_pins_are_kept_and_bounded(self) -> None:
        table = self.machine.inventory.table
        hard = [slot for slot in range(len(table)) if table.keeps.is_hard(slot)]
        assert all(table.state[slot] == SlotState.COMMITTED for slot in hard)
        assert not any(table.evictable(slot) for slot in hard)
        assert table.keeps.hard_bytes <= 0.3 * RULES.arena_bytes

    @invariant()
    def charged_is_what_is_busy(self) -> None:
        table = self.machine.inventory.table
        account = table.accounts.find(bytes(16))
        busy = [s for s in range(len(table)) if table.state[s] > SlotState.FREE]
        used = [table.slot_bytes(s) for s in busy if not table.keeps.is_extra(s)]
        assert (0 if account is None else account.used_bytes) == sum(used)

    def teardown(self) -> None:
        self.answer(UnpinBlocks(select=BlockSelector(tenant=bytes(16))))
        super().teardown()


TestPeopleModel = PeopleModel.TestCase
TestPeopleModel.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None
)
