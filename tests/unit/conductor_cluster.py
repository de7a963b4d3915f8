"""Beats, blocks and requests of a small made-up cluster, for the conductor's tests."""

from collections.abc import Sequence

from kvtide.bus.messages import (
    Admit,
    Beat,
    DecodeLoad,
    Load,
    NodeState,
    Outcome,
    PrefillLoad,
    RequestEnded,
)
from kvtide.kv import (
    BlockKey,
    Located,
    ModelFacts,
    NodeId,
    NodeRef,
    RequestId,
    Role,
    SlotRef,
    TenantId,
    Tier,
)

FACTS = ModelFacts(
    name="demo",
    digest="d" * 64,
    layers=32,
    kv_heads=1,
    head_dim=512,
    kv_dtype="float32",
    vocab_size=100,
    max_tokens=4096,
    eos_token_ids=(0,),
    numerics="test",
)
BLOCK = FACTS.block_tokens
GATEWAY = NodeRef(NodeId("g1"), 1)
_STATE_LOAD: dict[Role, Load] = {
    Role.PREFILL: PrefillLoad(),
    Role.DECODE: DecodeLoad(kv_tokens_capacity=100_000),
}


def ref(name: str, epoch: int = 1) -> NodeRef:
    return NodeRef(NodeId(name), epoch)


def beat(
    name: str,
    role: Role,
    *,
    epoch: int = 1,
    seq: int = 1,
    host: str = "h1",
    state: NodeState = NodeState.READY,
    load: Load | None = None,
    models: tuple[ModelFacts, ...] | None = None,
) -> Beat:
    own = load or _STATE_LOAD.get(role)
    works = role in {Role.PREFILL, Role.DECODE}
    return Beat(
        node=ref(name, epoch),
        roles=(role,),
        seq=seq,
        host=host,
        state=state,
        steps=0,
        load=(own,) if own is not None else (),
        models=models if models is not None else ((FACTS,) if works else ()),
    )


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def keys(count: int, *, start: int = 0) -> tuple[BlockKey, ...]:
    return tuple(key(start + number) for number in range(count))


def located(
    block: BlockKey, store: NodeRef, *, generation: int = 1, tier: Tier = Tier.DRAM
) -> Located:
    slot = SlotRef(store.node, store.epoch, tier, 0, generation * 64, 64, generation)
    return Located(block, slot, (1 << 64) - 1)


def admit(
    request: str = "r1",
    *,
    attempt: int = 0,
    tokens: int = 1000,
    chain: Sequence[BlockKey] | None = None,
    excluded: Sequence[str] = (),
    gateway: NodeRef = GATEWAY,
    model: str = "demo",
    max_new_tokens: int = 100,
    ttft_ms: float | None = None,
) -> Admit:
    return Admit(
        request=RequestId(request),
        attempt=attempt,
        gateway=gateway,
        tenant=TenantId("t"),
        model=model,
        keys=tuple(chain) if chain is not None else keys(tokens // BLOCK),
        prompt_tokens=tokens,
        max_new_tokens=max_new_tokens,
        excluded=tuple(NodeId(name) for name in excluded),
        ttft_ms=ttft_ms,
    )


def ended(request: str = "r1", *, attempt: int = 0) -> RequestEnded:
    return RequestEnded(
        request=RequestId(request),
        attempt=attempt,
        gateway=GATEWAY,
        tenant=TenantId("t"),
        model="demo",
        outcome=Outcome.FINISHED,
        code="stop",
        prompt_tokens=1000,
        cached_tokens=64,
        output_tokens=5,
        ttft_ms=12.0,
        total_ms=50.0,
    )
