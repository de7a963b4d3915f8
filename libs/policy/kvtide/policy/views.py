"""What a policy sees: a request, copies of its blocks, and workers with their load.

Loads are what a worker last reported plus what conductors have booked there since.
"""

from dataclasses import dataclass

from kvtide.kv import Located, NodeRef


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a block on a live store; ``host`` is the store's."""

    located: Located
    host: str


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to be placed.

    ``prefix[i]`` are the copies of the prompt's block ``i``, at least one each, from
    the first block to the last one that the pool has without a hole.
    ``block_bytes`` is a full block as stored. Targets that are None are not checked.
    """

    prompt_tokens: int
    max_new_tokens: int
    block_tokens: int
    block_bytes: int
    prefix: tuple[tuple[Copy, ...], ...] = ()
    ttft_ms: float | None = None
    tbt_ms: float | None = None

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV must be there before decode's first step: all but the last."""
        return max(0, self.prompt_tokens - 1)

    @property
    def reusable_blocks(self) -> int:
        """Blocks of ``prefix`` that count: full ones of the prompt without its last token."""
        return min(len(self.prefix), self.kv_tokens // self.block_tokens)

    @property
    def reserved_tokens(self) -> int:
        """What decode must have room for: the prompt and the longest answer."""
        return self.prompt_tokens + self.max_new_tokens


@dataclass(frozen=True, slots=True)
class PrefillWorker:
    """A prefill worker that takes work. Rates of zero are unknown: seeds stand in."""

    ref: NodeRef
    host: str
    waiting_tokens: int = 0
    tokens_per_s: float = 0.0
    load_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeWorker:
    """A decode worker that takes work. A capacity or step time of zero is unknown.

    ``kv_tokens`` are used, promised and booked ones; ``waiting`` and ``booked`` count
    requests that are not in its batch yet.
    """

    ref: NodeRef
    host: str
    running: int = 0
    waiting: int = 0
    booked: int = 0
    kv_tokens: int = 0
    kv_tokens_capacity: int = 0
    step_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """The workers that may be chosen for one request, each role in a fixed order."""

    prefills: tuple[PrefillWorker, ...]
    decodes: tuple[DecodeWorker, ...]
