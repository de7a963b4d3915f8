"""Names that carry gateways' keys: whose blocks get them, and what keys they become."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvtide.connect.gateway_keys import GatewayNames, key_in, name_of
from kvtide.connect.prefix_plan import Claim, Geometry, Group
from kvtide.connect.shape import BlockShape
from kvtide.connect.space import EngineSpace, ForeignSpace
from kvtide.connect.vllm_handover import tail_name
from kvtide.connect.vllm_names import RequestNames
from kvtide.kv import BlockKey, KeySpace, ModelFacts, SpaceId, TenantId

SECRET = bytes(range(32))
SIZE = 16
FACTS = ModelFacts(
    name="m",
    digest="00",
    layers=2,
    kv_heads=1,
    head_dim=8,
    kv_dtype="float32",
    vocab_size=100,
    max_tokens=1000,
    eos_token_ids=(),
    numerics="foreign/vllm",
    block_tokens=SIZE,
)
ONE_GROUP = Geometry((Group(SIZE),), SIZE, SIZE)
TOKENS = list(range(70))


def space_of(facts: ModelFacts, claim: Claim) -> KeySpace:
    return KeySpace(SECRET, SpaceId(TenantId(claim.tenant), facts, claim.salt))


def request(**more: Any) -> Any:
    hashes = [bytes([n]) * 32 for n in range(len(TOKENS) // SIZE)]
    said = {"request_id": "r", "all_token_ids": TOKENS, "block_hashes": hashes}
    return SimpleNamespace(**{**said, "mm_features": [], "prompt_embeds": None, **more})


@given(st.lists(st.integers(0, 1 << 20), max_size=100), st.integers(0, 6))
def test_names_are_the_keys_that_gateways_derive(tokens: list[int], ahead: int) -> None:
    space = space_of(FACTS, Claim("t"))
    full = len(tokens) // SIZE
    hashes = [b""] * min(ahead, full)
    names = GatewayNames(space, tokens, hashes, SIZE)
    assert [key_in(name) for name in names] == list(space.chain(tokens))[: len(hashes)]
    hashes += [b""] * (full - len(hashes))  # the engine's list has grown
    assert [key_in(name) for name in names[:]] == list(space.chain(tokens))
    with pytest.raises(IndexError):
        names[full]


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Some with windows only, some with groups of larger blocks, the leader's too."""
    sizes = draw(st.lists(st.sampled_from([SIZE, 2 * SIZE, 4 * SIZE]), min_size=1))
    windows = st.none() | st.integers(1, 100)
    groups = tuple(Group(size, draw(windows)) for size in sizes)
    return Geometry(groups, min(sizes), max(sizes))


@given(geometries(), st.lists(st.integers(0, 100), max_size=300))
def test_of_many_groups_the_leader_has_the_keys_and_all_others_their_own(
    geometry: Geometry, tokens: list[int]
) -> None:
    leader, claim = geometry.leader, Claim("t")
    facts = replace(FACTS, block_tokens=geometry.groups[leader].block_tokens)
    hashes = [b"hash %d" % n for n in range(len(tokens) // geometry.hash_tokens)]
    asked = request(all_token_ids=tokens, block_hashes=hashes)
    names = RequestNames(geometry, facts, space_of).of(asked, claim)
    found: list[BlockKey] = []
    for number, group in enumerate(geometry.groups):
        engine = EngineSpace("vllm", "00", "", f"group{number}", number == leader)
        space = ForeignSpace(SECRET, engine, BlockShape(2, 64), TenantId("t"))
        blocks = len(tokens) // group.block_tokens
        keys = space.keys(geometry.names(number, 0, blocks, names))
        assert len(keys) == blocks
        if number == leader:
            assert keys == space_of(facts, claim).chain(tokens)
        found += [*keys, space.key(tail_name(b"", tokens))]
    assert len(set(found)) == len(found)


def test_the_leader_is_the_first_that_attends_to_all() -> None:
    window, full = Group(SIZE, 64), Group(SIZE)
    cases = {(window, full, full): 1, (full, window): 0, (window, window): 0, (): 0}
    for groups, leader in cases.items():
        assert Geometry(groups, SIZE, SIZE).leader == leader


def test_one_rank_of_one_group_has_the_key_and_the_others_keys_of_their_own() -> None:
    key = BlockKey(bytes(range(16)))
    name = name_of(key)
    shape = BlockShape(2, 64)
    spaces = [
        ForeignSpace(
            SECRET,
            EngineSpace("vllm", "00", "", place, adopts=adopts),
            shape,
            TenantId("t"),
        )
        for place, adopts in (("tp0/2 group0", True), ("tp1/2 group0", False))
    ]
    found = [space.key(name) for space in spaces]
    assert found[0] == key
    assert found[1] != key
    assert spaces[0].key(b"an engine's hash") != spaces[1].key(b"an engine's hash")


def test_an_adapters_blocks_have_the_keys_that_gateways_derive_for_it() -> None:
    names = RequestNames(ONE_GROUP, FACTS, space_of)
    adapted = FACTS.adapted("tuned", "digest")
    keys = [
        *space_of(adapted, Claim("t")).chain(TOKENS),
        *space_of(FACTS, Claim("t")).chain(TOKENS),
        *space_of(FACTS.adapted("tuned", "other"), Claim("t")).chain(TOKENS),
    ]
    assert len(set(keys)) == len(keys)
    found = names.of(request(), Claim("t", "digest"))
    assert [*map(key_in, found)] == keys[: len(found)]


def test_a_worker_names_blocks_as_gateways_do_and_forgets_requests() -> None:
    names = RequestNames(ONE_GROUP, FACTS, space_of)
    asked, claim = request(), Claim("t", "", "salt")
    keys = space_of(FACTS, claim).chain(TOKENS)
    assert tuple(map(key_in, names.of(asked, claim))) == keys
    assert names.of(asked, claim) is names.of(asked, claim)
    names.forget("r")
    assert len(names) == 0


@pytest.mark.parametrize(
    ("facts", "geometry", "claim", "more"),
    [
        (None, ONE_GROUP, Claim(), {}),
        (FACTS, Geometry((), SIZE, SIZE), Claim(), {}),
        (FACTS, Geometry((Group(SIZE, 64), Group(2 * SIZE)), SIZE, SIZE), Claim(), {}),
        (FACTS, Geometry((Group(2 * SIZE),), 2 * SIZE, 2 * SIZE), Claim(), {}),
        (FACTS, ONE_GROUP, Claim(), {"mm_features": ["a picture"]}),
        (FACTS, ONE_GROUP, Claim(), {"prompt_embeds": object()}),
    ],
)
def test_what_depends_on_more_than_tokens_keeps_the_engines_own_names(
    facts: ModelFacts | None, geometry: Geometry, claim: Claim, more: dict[str, Any]
) -> None:
    asked = request(**more)
    assert (
        RequestNames(geometry, facts, space_of).of(asked, claim) is asked.block_hashes
    )
