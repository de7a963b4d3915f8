"""A block's key changes with each input that changes its KV, and with nothing else."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, strategies as st

from kvtide.kv import (
    KEY_BYTES,
    BlockKey,
    KeySpace,
    ModelFacts,
    SpaceId,
    TenantId,
    derive_key,
)

SECRET = bytes(range(32))
FACTS = ModelFacts(
    name="tiny",
    digest="d1",
    layers=2,
    kv_heads=1,
    head_dim=16,
    kv_dtype="float32",
    vocab_size=1000,
    max_tokens=4096,
    eos_token_ids=(0,),
    numerics="float32/sdpa",
    block_tokens=16,
)
TOKENS = tuple(range(64))


@dataclass(frozen=True)
class Inputs:
    """All that goes into the first key of a chain."""

    secret: bytes = SECRET
    key_id: int = 0
    tenant: str = "t"
    salt: str = ""
    adapter: str = ""
    facts: ModelFacts = FACTS
    parent: BlockKey | None = None
    tokens: tuple[int, ...] = TOKENS

    @property
    def space(self) -> KeySpace:
        space = SpaceId(TenantId(self.tenant), self.facts, self.salt, self.adapter)
        return KeySpace(self.secret, space, key_id=self.key_id)

    def key(self) -> BlockKey:
        return self.space.chain(self.tokens, parent=self.parent)[0]


def facts(**changes: object) -> ModelFacts:
    return replace(FACTS, **changes)


BASE = Inputs()
PARENT = BlockKey(b"p" * KEY_BYTES)

DIFFERENT = {
    "tenant": Inputs(tenant="u"),
    "no tenant": Inputs(tenant=""),
    "salt": Inputs(salt="s"),
    "a salt spelled like the tenant": Inputs(salt="t"),
    "adapter": Inputs(adapter="a"),
    "an adapter spelled like the tenant": Inputs(adapter="t"),
    "block size": Inputs(facts=facts(block_tokens=32)),
    "model digest": Inputs(facts=facts(digest="d2")),
    "KV dtype": Inputs(facts=facts(kv_dtype="bfloat16")),
    "layout version": Inputs(facts=facts(layout_version=2)),
    "layers": Inputs(facts=facts(layers=3)),
    "KV heads": Inputs(facts=facts(kv_heads=2)),
    "head size": Inputs(facts=facts(head_dim=32)),
    "numerics": Inputs(facts=facts(numerics="bfloat16/sdpa")),
    "key id": Inputs(key_id=1),
    "secret": Inputs(secret=bytes(32)),
    "parent": Inputs(parent=PARENT),
    "first token": Inputs(tokens=(7, *TOKENS[1:])),
    "last token of the block": Inputs(tokens=(*TOKENS[:15], 999, *TOKENS[16:])),
    "order of tokens": Inputs(tokens=tuple(reversed(TOKENS))),
}

SAME = {
    "model name": Inputs(facts=facts(name="other")),
    "context length": Inputs(facts=facts(max_tokens=1)),
    "end tokens": Inputs(facts=facts(eos_token_ids=(1, 2))),
    "tokens after the block": Inputs(tokens=(*TOKENS[:16], 5)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_changes_the_kv_changes_the_key(what: str) -> None:
    assert DIFFERENT[what].key() != BASE.key()


def test_no_two_of_them_collide() -> None:
    keys = [BASE.key(), *(inputs.key() for inputs in DIFFERENT.values())]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("what", SAME)
def test_what_does_not_change_the_kv_keeps_the_key(what: str) -> None:
    assert SAME[what].key() == BASE.key()


def test_a_salt_never_leads_into_another_tenants_space() -> None:
    assert Inputs(salt="s").key() == Inputs(salt="s").key()
    assert Inputs(salt="s").key() != Inputs(salt="s", tenant="u").key()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Inputs(salt="x"), Inputs(tenant="x")),
        (Inputs(tenant="", salt="x"), Inputs(tenant="", adapter="x")),
        (Inputs(salt="x", adapter="y"), Inputs(salt="y", adapter="x")),
        (Inputs(tenant="ab", adapter="c"), Inputs(tenant="a", adapter="bc")),
        (Inputs(tenant="a", adapter=""), Inputs(tenant="", adapter="a")),
        (Inputs(facts=facts(digest="dn", numerics="x")), Inputs(facts=facts(digest="d", numerics="nx"))),
        (Inputs(tenant="salt:s"), Inputs(salt="s")),
        (Inputs(tenant="a", salt="bc"), Inputs(tenant="ab", salt="c")),
    ],
)  # fmt: skip
def test_neighbouring_parts_do_not_run_into_one_another(
    one: Inputs, other: Inputs
) -> None:
    assert one.key() != other.key()


def test_tags_tell_model_layout_and_owner_apart() -> None:
    base = BASE.space.tags
    other_model = DIFFERENT["model digest"].space.tags
    assert (other_model.layout, other_model.tenant) == (base.layout, base.tenant)
    assert other_model.model != base.model
    assert DIFFERENT["numerics"].space.tags.model != base.model
    assert DIFFERENT["block size"].space.tags.layout != base.layout
    assert DIFFERENT["tenant"].space.tags.tenant != base.tenant
    salted = DIFFERENT["a salt spelled like the tenant"].space.tags
    assert salted.tenant == base.tenant
    assert DIFFERENT["key id"].space.tags.key_id == 1


def test_keys_of_purposes_differ_and_need_a_long_secret() -> None:
    purposes = ("block identity 0", "block identity 1", "capabilities", "transfer")
    assert len({derive_key(SECRET, purpose) for purpose in purposes}) == len(purposes)
    with pytest.raises(ValueError, match="at least 32 bytes"):
        derive_key(bytes(31), "transfer")


token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=100)


@given(token_lists)
def test_a_chain_has_a_key_for_each_full_block(tokens: list[int]) -> None:
    chain = BASE.space.chain(tokens)
    assert len(chain) == len(tokens) // 16
    assert all(len(key) == KEY_BYTES for key in chain)
    assert len(set(chain)) == len(chain)


@given(token_lists, token_lists)
def test_chains_agree_exactly_on_their_common_blocks(
    one: list[int], other: list[int]
) -> None:
    pairs = zip(BASE.space.chain(one), BASE.space.chain(other), strict=False)
    for i, (first, second) in enumerate(pairs):
        assert (first == second) == (one[: 16 * (i + 1)] == other[: 16 * (i + 1)])


@given(token_lists, st.integers(0, 6))
def test_a_chain_can_be_continued(tokens: list[int], blocks: int) -> None:
    chain = BASE.space.chain(tokens)
    begun = BASE.space.chain(tokens[: 16 * blocks])
    parent = begun[-1] if begun else None
    rest = BASE.space.chain(tokens[16 * len(begun) :], parent=parent)
    assert (*begun, *rest) == chain
