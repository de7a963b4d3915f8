"""What the scripted workers behind a gateway serve, and what they do."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.unit.gateway_models import byte_level

from kvtide.bus.messages import DecodeWork, RefuseCode, RejectCode, TokenLogprobs
from kvtide.kv import ModelFacts

MODEL = "tiny"
TOKENIZER = byte_level()
END = TOKENIZER.encode("<|im_end|>").ids[0]
FACTS = ModelFacts(
    name=MODEL,
    digest="abcdef0123456789",
    layers=1,
    kv_heads=1,
    head_dim=2,
    kv_dtype="float32",
    vocab_size=401,
    max_tokens=512,
    eos_token_ids=(END,),
    numerics="n",
    block_tokens=16,
)


@dataclass
class Script:
    """What the workers do. Tests change it before or during requests."""

    answer: str = "Hello, wörld 🌊!"
    step_s: float = 0.0
    prefill_s: float = 0.0
    reject: RejectCode | None = None
    conductor_silent: bool = False
    silent_node: str = ""
    """A conductor that does not answer, while others do."""
    refuse: RefuseCode | None = None
    reused: int = 0
    hold_at: int = -1
    """Decode stops before this token until ``go`` is set."""
    go: asyncio.Event = field(default_factory=asyncio.Event)
    lose_finish: bool = False
    drop_tokens: bool = False
    """Token events are lost; only pulls bring them."""
    context: int = FACTS.max_tokens
    dead_after_s: float = 30.0
    """How long a loop may be held up before its node counts as dead."""
    ids: list[int] | None = None
    """The answer's tokens, if it is not ``answer`` in the tokenizer's own."""
    burst: int = 1
    """Tokens in one message."""
    pictures: bool = False
    """The workers' engine sees them, and the model's template has a place for them."""
    prompt_tokens: int | None = None
    """How long the workers say that prompts came out."""


def logprobs_of(
    work: DecodeWork, index: int, ids: Sequence[int]
) -> tuple[TokenLogprobs, ...]:
    """Token number i has -i; the likeliest are counted down from it."""
    count = work.sampling.logprobs
    if count is None:
        return ()
    return tuple(
        TokenLogprobs(
            -float(index + i),
            tuple((max(token - rank, 0), -float(rank)) for rank in range(count)),
        )
        for i, token in enumerate(ids)
    )
