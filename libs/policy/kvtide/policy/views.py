"""What a policy sees: a request, copies of its blocks, and workers with their load.

Loads are what a worker last reported plus what conductors have booked there since. A
scale of thousands of workers has the same in columns: see ``columns``.
"""

from dataclasses import dataclass, field

from kvtide.kv import Located, NodeRef
from kvtide.policy.curves import LoadCurve, PrefillCurve, StepCurve
from kvtide.policy.lateness import Lateness


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a block on a live store; ``host`` is the store's.

    ``hint``: what that store holds is not known exactly, so it may be gone.
    """

    located: Located
    host: str
    hint: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to be placed.

    ``prefix[i]`` are the copies of the prompt's block ``i``, at least one each, from
    the first block to the last one that the pool has without a hole. ``block_bytes`` is
    a full block as stored. Targets that are None are not checked. ``turn`` is the number
    of the decision, from which policies that don't look choose. ``answer_tokens`` is the
    length that the answer is expected to have, 0 if nothing is known. Below 0,
    ``priority`` is work that may be shed. ``lateness``: by how much first tokens were
    seen to come later than the parts of a placement add up to. ``crowd_ms`` is how much
    later than predicted they come with as much open as there is: whether the request is
    taken hangs on it, not where it goes. ``one_node``: prefill and
    decode must be on the same node, whose own blocks alone are of use.
    """

    prompt_tokens: int
    max_new_tokens: int
    block_tokens: int
    block_bytes: int
    prefix: tuple[tuple[Copy, ...], ...] = ()
    ttft_ms: float | None = None
    tbt_ms: float | None = None
    priority: int = 0
    turn: int = 0
    answer_tokens: float = 0.0
    lateness: Lateness | None = None
    crowd_ms: float = 0.0
    one_node: bool = False

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV must be there before decode's first step: all but the last."""
        return max(0, self.prompt_tokens - 1)

    @property
    def full_blocks(self) -> int:
        """Blocks that could be reused: full ones of the prompt without its last token."""
        return self.kv_tokens // self.block_tokens

    @property
    def reusable_blocks(self) -> int:
        """Those of them that the pool has."""
        return min(len(self.prefix), self.full_blocks)

    @property
    def reserved_tokens(self) -> int:
        """What decode must have room for: the prompt and the longest answer."""
        return self.prompt_tokens + self.max_new_tokens


@dataclass(frozen=True, slots=True)
class PrefillWorker:
    """A prefill worker that takes work. Rates of zero are unknown: seeds stand in.

    What waits is ``waiting_ms`` long, and ``waiting_tokens`` more of which no time is
    known. ``inflows`` are loads from other hosts that are on their way to it. Curves
    that were fitted to its class come before its own rates.

    ``pending_blocks`` of this prompt, after those that the pool has, are computed there
    for other requests: the last is done in ``pending_ms``. The worker waits for them.
    """

    ref: NodeRef
    host: str
    waiting_tokens: int = 0
    tokens_per_s: float = 0.0
    load_bytes_per_s: float = 0.0
    waiting_ms: float = 0.0
    inflows: float = 0.0
    pending_blocks: int = 0
    pending_ms: float = 0.0
    curve: PrefillCurve | None = None
    loading: LoadCurve | None = None


@dataclass(frozen=True, slots=True)
class DecodeWorker:
    """A decode worker that takes work. A capacity or step time of zero is unknown.

    ``kv_tokens`` are used, promised and booked ones; ``waiting`` and ``booked`` count
    requests that are not in its batch yet. ``coming`` and ``coming_kv_tokens`` are by
    how much both are predicted to change until the request is there (or over its life).
    ``fill_tokens`` of prompts it has yet to compute itself, booked ones included.
    """

    ref: NodeRef
    host: str
    running: int = 0
    waiting: int = 0
    booked: int = 0
    kv_tokens: int = 0
    kv_tokens_capacity: int = 0
    step_ms: float = 0.0
    coming: float = 0.0
    coming_kv_tokens: float = 0.0
    fill_tokens: int = 0
    curve: StepCurve | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """The workers that may be chosen for one request, each role in a fixed order.

    ``outflows`` counts loads that are on their way from each host's stores.
    """

    prefills: tuple[PrefillWorker, ...]
    decodes: tuple[DecodeWorker, ...]
    outflows: dict[str, float] = field(default_factory=dict[str, float])
