"""The paper's analytic cost model (FAST'25, §3 and Table 1), for machines not measured.

FLOPs(n) = l (a n² d + b n d²) with l layers, model dimension d, and constants a and b of
attention and of the linear parts. Reusing p tokens saves FLOPs(p) and moves their KV:
it pays where B / G > 2 d s / (gqa (a p d + b d²)), with B the bandwidth, G the compute,
s the bytes of an element and gqa the queries that share a head of KV.
"""

from dataclasses import dataclass

from kvtide.policy.curves import LoadCurve, PrefillCurve, StepCurve


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A transformer as the model sees it; the defaults are those of LLaMA3-70B."""

    layers: int = 80
    dimension: int = 8192
    attention_flops: float = 4.0
    linear_flops: float = 22.0
    kv_sharing: int = 8
    element_bytes: int = 2

    @property
    def kv_bytes(self) -> float:
        """Bytes of one token's KV: 320 KiB for LLaMA3-70B."""
        return 2 * self.layers * self.dimension * self.element_bytes / self.kv_sharing

    def flops(self, tokens: float) -> float:
        """To compute ``tokens`` from nothing."""
        d = self.dimension
        attention = self.attention_flops * tokens * tokens * d
        return self.layers * (attention + self.linear_flops * tokens * d * d)

    def flops_after(self, tokens: float, reused: float) -> float:
        """To compute ``tokens`` of which the first ``reused`` need not be."""
        return max(0.0, self.flops(tokens) - self.flops(reused))

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights, of which each is one of two FLOPs of a token."""
        per_token = self.layers * self.linear_flops * self.dimension**2
        return per_token / 2 * self.element_bytes


@dataclass(frozen=True, slots=True)
class NodeShape:
    """A node's accelerators together, and its links; rates in bytes and FLOPs a second.

    ``efficiency`` is the share of ``flops_per_s`` that is really reached.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    host_bytes_per_s: float
    network_bytes_per_s: float
    efficiency: float = 1.0


A800 = NodeShape(8 * 312e12, 8 * 2.039e12, 128e9, 100e9)
"""8 x A800-SXM4-80GB with 4 x 200 Gbps, as in the paper's Table 1."""

H800 = NodeShape(8 * 989e12, 8 * 3.35e12, 128e9, 200e9)
"""8 x H800 with 8 x 200 Gbps."""


def break_even_bytes_per_s(model: ModelShape, node: NodeShape, tokens: float) -> float:
    """The bandwidth above which reusing a prefix of ``tokens`` beats computing it."""
    if tokens <= 0:
        return float("inf")
    seconds = model.flops(tokens) / (node.flops_per_s * node.efficiency)
    return model.kv_bytes * tokens / seconds


def prefill_s(
    model: ModelShape, node: NodeShape, tokens: float, reused: float = 0.0
) -> float:
    """Seconds to compute a prompt of which ``reused`` tokens are there."""
    rate = node.flops_per_s * node.efficiency
    return model.flops_after(tokens, reused) / rate


def step_s(model: ModelShape, node: NodeShape, rows: float, kv_tokens: float) -> float:
    """Seconds of a decode step, which reads all weights and all KV."""
    read = model.weight_bytes + kv_tokens * model.kv_bytes
    compute = rows * model.flops(1) / (node.flops_per_s * node.efficiency)
    return max(read / node.memory_bytes_per_s, compute)


def prefill_curve_of(model: ModelShape, node: NodeShape) -> PrefillCurve:
    """The same as ``prefill_s``, as a curve over new and reused tokens."""
    rate = node.flops_per_s * node.efficiency / 1000
    d = model.dimension
    attention = model.layers * model.attention_flops * d
    linear = model.layers * model.linear_flops * d * d
    # a (n² - p²) = a (2 pairs - new) with pairs = new (new + 2 p + 1) / 2
    return PrefillCurve(0.0, (linear - attention) / rate, 2 * attention / rate)


def load_curve_of(node: NodeShape) -> LoadCurve:
    """Loading at the speed of the host's memory and of the network."""
    return LoadCurve(0.0, 1000 / node.host_bytes_per_s, 1000 / node.network_bytes_per_s)


def step_curve_of(model: ModelShape, node: NodeShape) -> StepCurve:
    """``step_s`` where memory is the limit."""
    per_byte = 1000 / node.memory_bytes_per_s
    return StepCurve(model.weight_bytes * per_byte, 0.0, model.kv_bytes * per_byte)
