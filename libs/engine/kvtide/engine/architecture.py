"""From config.json to the shape of a decoder; refuses what can't be served exactly.

Field names and defaults are those of transformers' configuration classes. A default
that changes the computation (Mistral's sliding window, Qwen3's head size) is taken from
there, since that is what transformers would run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from kvtide.engine.errors import BrokenModel, UnsupportedModel

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeType = Literal["default", "linear", "llama3"]

_T = TypeVar("_T")

_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_RMS_NORM_EPS = 1e-6
_QWEN3_HEAD_DIM = 128
_OFF: tuple[object, ...] = (None, False, 0)
_ONE: tuple[object, ...] = (None, 1)
_FOREIGN: Mapping[str, tuple[object, ...]] = {
    # mixtures of experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), _OFF),
    # logits and scores that are capped, scaled or given a sink
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _OFF),
    **dict.fromkeys(("attention_sink", "attn_temperature_tuning"), _OFF),
    **dict.fromkeys(("logit_scale", "logits_scaling", "attention_multiplier"), _ONE),
    **dict.fromkeys(("residual_multiplier", "embedding_multiplier"), _ONE),
    # attention of other kinds
    **dict.fromkeys(("kv_lora_rank", "attention_chunk_size", "use_qk_norm"), _OFF),
    **dict.fromkeys(("no_rope_layers", "no_rope_layer_interval"), (None, [], 0)),
    **dict.fromkeys(
        ("alibi", "use_mrope", "rope_interleaved", "cross_attention"), _OFF
    ),
}
"""Field → values that change nothing, of fields that no served family has."""
_NULL = msgspec.Raw(b"null")
_MISTRAL_SLIDING_WINDOW = 4096


class RopeFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`rope_parameters` (or its older name `rope_scaling`) as files have it."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None


class ConfigFile(msgspec.Struct, frozen=True):
    """The fields of config.json that decide what is computed."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    architectures: list[str] | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = _DEFAULT_RMS_NORM_EPS
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float | None = None
    rope_scaling: msgspec.Raw = _NULL
    rope_parameters: msgspec.Raw = _NULL
    partial_rotary_factor: float | None = None
    sliding_window: int | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool = False
    layer_types: list[str] | None = None
    quantization_config: msgspec.Raw = _NULL
    eos_token_id: int | list[int] | None = None


class GenerationFile(msgspec.Struct, frozen=True):
    """The fields of generation_config.json that matter here."""

    eos_token_id: int | list[int] | None = None


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position settings; the factors are 1 and unused for type "default"."""

    type: RopeType
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_tokens: int = 0

    def canonical(self) -> str:
        """One text for one meaning."""
        text = f"rope={self.type}:theta={self.theta:g}"
        if self.type == "linear":
            return f"{text}:factor={self.factor:g}"
        if self.type == "llama3":
            return (
                f"{text}:factor={self.factor:g}:low={self.low_freq_factor:g}"
                f":high={self.high_freq_factor:g}:original={self.original_max_tokens}"
            )
        return text


@dataclass(frozen=True, slots=True)
class Architecture:
    """A pre-norm decoder with full attention, rotary positions and a gated MLP."""

    family: Family
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_tokens: int
    rms_norm_eps: float
    rope: Rope
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    eos_token_ids: tuple[int, ...]


def read_architecture(folder: Path, source: str) -> Architecture:
    """Read and judge a model folder's config.json.

    Raises:
        BrokenModel: config.json is missing or is not what it should be.
        UnsupportedModel: it describes something that can't be served exactly.
    """
    config = _decode(folder / "config.json", ConfigFile)
    family = _family(config, source)
    _refuse_foreign(_decode(folder / "config.json", dict[str, Any]), source)
    _refuse_unservable(config, family, source)
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads or heads
    head_dim = config.head_dim or (
        _QWEN3_HEAD_DIM if family == "qwen3" else config.hidden_size // heads
    )
    if heads % kv_heads or head_dim % 2:
        raise UnsupportedModel(
            source,
            f"{heads} heads on {kv_heads} KV heads of {head_dim} numbers"
            " don't divide evenly",
        )
    llama_bias = family == "llama" and config.attention_bias
    qwen3_bias = family == "qwen3" and config.attention_bias
    return Architecture(
        family=family,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        max_tokens=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope=_rope(config, source),
        tied_embeddings=config.tie_word_embeddings,
        qkv_bias=llama_bias or qwen3_bias or family == "qwen2",
        output_bias=llama_bias or qwen3_bias,
        mlp_bias=family == "llama" and config.mlp_bias,
        head_norms=family == "qwen3",
        eos_token_ids=_eos_token_ids(folder, config),
    )


def _decode(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        reason = f"can't be read ({error.strerror or error})"
        raise BrokenModel(path, reason) from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BrokenModel(path, f"is not a usable configuration ({error})") from error


def _family(config: ConfigFile, source: str) -> Family:
    names = config.architectures or []
    for name in names:
        if name in _FAMILIES:
            return _FAMILIES[name]
    raise UnsupportedModel(
        source,
        f"its architecture is {', '.join(names) or 'not named in config.json'};"
        f" served are {', '.join(_FAMILIES)}",
    )


def _refuse_foreign(fields: Mapping[str, object], source: str) -> None:
    """Other families' fields under a served name: the model was not made by its code."""
    for name, neutral in _FOREIGN.items():
        if fields.get(name, neutral[0]) not in neutral:
            raise UnsupportedModel(
                source,
                f"its config.json has {name}, which changes what is computed and is not"
                " served",
            )


def _refuse_unservable(config: ConfigFile, family: Family, source: str) -> None:
    window = config.sliding_window
    if window is msgspec.UNSET:
        window = _MISTRAL_SLIDING_WINDOW
    # a window that no sequence outgrows hides nothing
    narrow = window is not None and window < config.max_position_embeddings
    windowed = family == "mistral" and narrow
    windowed |= family in {"qwen2", "qwen3"} and config.use_sliding_window
    if windowed or any(kind != "full_attention" for kind in config.layer_types or []):
        raise UnsupportedModel(
            source, "it uses sliding-window attention; only full attention is served"
        )
    if config.hidden_act != "silu":
        raise UnsupportedModel(
            source, f"its activation is {config.hidden_act}; only silu is served"
        )
    if bytes(config.quantization_config) != bytes(_NULL):
        raise UnsupportedModel(
            source, "its weights are quantised; float weights are needed"
        )
    if min(config.num_attention_heads, config.num_hidden_layers) < 1:
        raise UnsupportedModel(source, "it has no layers or no attention heads")


def _rope(config: ConfigFile, source: str) -> Rope:
    fields = RopeFields()
    for raw in (config.rope_scaling, config.rope_parameters):
        try:
            fields = msgspec.json.decode(raw, type=RopeFields | None) or fields
        except msgspec.ValidationError as error:
            reason = f"its rope settings are not understood ({error})"
            raise UnsupportedModel(source, reason) from error
    if (fields.partial_rotary_factor or config.partial_rotary_factor or 1.0) != 1.0:
        raise UnsupportedModel(source, "it rotates only a part of each head")
    theta = fields.rope_theta or config.rope_theta or _DEFAULT_ROPE_THETA
    match fields.rope_type or fields.type or "default":
        case "default":
            return Rope("default", theta)
        case "linear" if fields.factor:
            return Rope("linear", theta, fields.factor)
        case "llama3" if (
            fields.factor
            and fields.low_freq_factor
            and fields.high_freq_factor
            and fields.original_max_position_embeddings
        ):
            return Rope(
                "llama3",
                theta,
                fields.factor,
                fields.low_freq_factor,
                fields.high_freq_factor,
                fields.original_max_position_embeddings,
            )
        case "linear" | "llama3" as named:
            reason = f"its {named} rope settings are incomplete"
            raise UnsupportedModel(source, reason)
        case other:
            reason = f"its rope type is {other}; served are default, linear and llama3"
            raise UnsupportedModel(source, reason)


def _eos_token_ids(folder: Path, config: ConfigFile) -> tuple[int, ...]:
    """What transformers' generate stops at: those of generation_config.json, where it is."""
    path = folder / "generation_config.json"
    if path.exists():
        ids = _decode(path, GenerationFile).eos_token_id
    else:
        ids = config.eos_token_id
    if ids is None:
        return ()
    return tuple(sorted({ids} if isinstance(ids, int) else set(ids)))
