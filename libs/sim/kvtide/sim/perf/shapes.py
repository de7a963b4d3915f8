"""A cluster as its TOML describes it, and the curves that follow from it."""

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvtide.kv import Layout, ModelFacts
from kvtide.policy import LoadCurve, PrefillCurve, StepCurve
from kvtide.policy.analytic import (
    ModelShape,
    NodeShape,
    load_curve_of,
    prefill_curve_of,
)
from kvtide.policy.class_costs import ClassProfile
from kvtide.runtime import ConfigError

_MS = 1000.0


class ModelText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model: FLOPs as in the paper's formula, KV from its heads."""

    name: str
    layers: int
    dimension: int
    kv_heads: int
    head_dim: int
    attention_flops: float
    linear_flops: float
    weight_bytes: float
    kv_dtype: str = "bfloat16"
    block_tokens: int = 512


class NodeText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node; rates a second. Efficiencies are shares of what the formula says."""

    flops_per_s: float
    efficiency: float
    attention_efficiency: float
    memory_bytes: float
    memory_share: float
    memory_bytes_per_s: float
    memory_efficiency: float
    step_overhead_ms: float
    host_bytes_per_s: float
    network_bytes_per_s: float
    pool_tokens: int
    ssd_tokens: int = 0
    ssd_bytes_per_s: float = 6e9


class EngineText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How engines batch, those of the baselines too; sizes in requests and tokens."""

    batch: int = 256
    prefill_batch_tokens: int = 32768
    chunk_tokens: int = 512
    prepare_ahead: int = 2
    handover_ms: float = 8.0


class ClusterText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    prefills: int
    decodes: int
    model: ModelText
    node: NodeText
    engine: EngineText = msgspec.field(default_factory=EngineText)


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """A cluster of equal nodes, each of one role, and what work takes on them."""

    text: ClusterText

    @property
    def model(self) -> ModelShape:
        """As the paper's formula sees it."""
        text = self.text.model
        return ModelShape(
            layers=text.layers,
            dimension=text.dimension,
            attention_flops=text.attention_flops,
            linear_flops=text.linear_flops,
            kv_sharing=text.dimension // (text.kv_heads * text.head_dim),
        )

    @property
    def node(self) -> NodeShape:
        """With nominal rates; the efficiency is in ``prefill``."""
        text = self.text.node
        return NodeShape(
            text.flops_per_s,
            text.memory_bytes_per_s,
            text.host_bytes_per_s,
            text.network_bytes_per_s,
        )

    @property
    def prefill(self) -> PrefillCurve:
        """Compute, at the efficiencies that linear parts and attention reach."""
        text, node = self.text.model, self.text.node
        share = node.efficiency / node.attention_efficiency
        model = ModelShape(
            text.layers,
            text.dimension,
            text.attention_flops * share,
            text.linear_flops,
        )
        shape = NodeShape(
            node.flops_per_s,
            node.memory_bytes_per_s,
            node.host_bytes_per_s,
            node.network_bytes_per_s,
            node.efficiency,
        )
        return prefill_curve_of(model, shape)

    @property
    def step(self) -> StepCurve:
        """Weights and KV read, an overhead, and each row's linear FLOPs."""
        text, node = self.text.model, self.text.node
        byte_ms = _MS / (node.memory_bytes_per_s * node.memory_efficiency)
        row_ms = _MS * self.model.flops(1) / node.flops_per_s
        fixed_ms = node.step_overhead_ms + text.weight_bytes * byte_ms
        return StepCurve(fixed_ms, row_ms, self.model.kv_bytes * byte_ms)

    @property
    def loading(self) -> LoadCurve:
        """From this host's memory, and over the network."""
        return load_curve_of(self.node)

    @property
    def profile(self) -> ClassProfile:
        """What a conductor is told of these workers."""
        return ClassProfile(self.prefill, self.loading, self.step)

    @property
    def facts(self) -> ModelFacts:
        """As workers announce the model."""
        text = self.text.model
        return ModelFacts(
            name=text.name,
            digest="0" * 64,
            layers=text.layers,
            kv_heads=text.kv_heads,
            head_dim=text.head_dim,
            kv_dtype=text.kv_dtype,
            vocab_size=128_256,
            max_tokens=1 << 20,
            eos_token_ids=(),
            numerics="simulated",
            block_tokens=text.block_tokens,
        )

    @property
    def block_bytes(self) -> int:
        """A block as stored."""
        return Layout.of(self.facts).slot_bytes

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of KV that a node's GPUs hold beside the weights."""
        node = self.text.node
        room = node.memory_bytes * node.memory_share - self.text.model.weight_bytes
        return max(0, int(room / self.model.kv_bytes))


def read_cluster(path: Path) -> ClusterShape:
    """A cluster from its TOML file.

    Raises:
        ConfigError: it can't be read, or describes no cluster.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        text = msgspec.convert(table, ClusterText)
    except (OSError, UnicodeDecodeError) as error:
        message = f"{path} can't be read: {error}"
        raise ConfigError(message, key="cluster") from error
    except (
        tomllib.TOMLDecodeError,
        msgspec.ValidationError,
        RecursionError,
    ) as error:
        message = f"{path}: {error}; examples/clusters has examples"
        raise ConfigError(message, key="cluster") from error
    return checked(text, str(path))


def checked(text: ClusterText, name: str) -> ClusterShape:
    """The cluster, if a request can be served on it.

    Raises:
        ConfigError: a size or rate that is not above zero, or no room for KV.
    """
    least = (
        ("prefills", text.prefills),
        ("decodes", text.decodes),
        ("node.flops_per_s", text.node.flops_per_s),
        ("node.efficiency", text.node.efficiency),
        ("node.attention_efficiency", text.node.attention_efficiency),
        ("node.memory_bytes_per_s", text.node.memory_bytes_per_s),
        ("node.memory_efficiency", text.node.memory_efficiency),
        ("node.host_bytes_per_s", text.node.host_bytes_per_s),
        ("node.network_bytes_per_s", text.node.network_bytes_per_s),
        ("node.ssd_bytes_per_s", text.node.ssd_bytes_per_s),
        ("engine.batch", text.engine.batch),
        ("engine.chunk_tokens", text.engine.chunk_tokens),
    )
    bad = [key for key, value in least if not 0 < value < math.inf]
    shape = ClusterShape(text)
    if bad:
        raise ConfigError(f"{name}: {bad[0]} must be above zero", key=bad[0])
    try:
        _ = shape.block_bytes
    except ValueError as error:
        raise ConfigError(f"{name}: model: {error}", key="model") from error
    try:
        capacity_tokens = shape.kv_capacity_tokens
    except (ValueError, OverflowError, ZeroDivisionError) as error:
        raise ConfigError(f"{name}: node: {error}", key="node.memory_bytes") from error
    if capacity_tokens < text.model.block_tokens:
        message = f"{name}: the weights leave no memory for KV on a node"
        raise ConfigError(message, key="node.memory_bytes")
    return shape
