"""From a GGUF file of a Llama model to a folder as transformers writes it."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from kvtide.engine.errors import BrokenModel
from kvtide.engine.gguf_file import GgufFile, halves
from kvtide.engine.progress import Progress, ProgressReport

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3


def convert_gguf(path: Path, folder: Path, report: Progress) -> None:
    """Write config, tokenizer, chat template and bfloat16 safetensors into a folder.

    Each weight is dequantised to float32 and rounded once, to nearest even.

    Raises:
        BrokenModel: it is no GGUF file of a Llama model with a byte-level BPE tokenizer
            of the "smollm" kind.
        OSError: the folder can't be written.
    """
    fields = GgufFile(path)
    for name, expected in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if fields[name] != expected:
            raise BrokenModel(path, f"{name} is {fields[name]!r}, not {expected!r}")
    tied = "output.weight" not in fields.tensors
    _write_json(folder / "config.json", _config(fields, tied=tied))
    _write_json(folder / "generation_config.json", _special_ids(fields))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))
    (folder / "tokenizer.json").write_text(_tokenizer(fields).to_str(pretty=True))
    heads: int = fields["llama.attention.head_count"]
    kv_heads: int = fields["llama.attention.head_count_kv"]
    tensors: dict[str, Tensor] = {}
    for index, name in enumerate(fields.tensors):
        weight = fields.weight(name)
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = halves(weight, heads if ".attn_q." in name else kv_heads)
        tensors[_name(path, name)] = torch.from_numpy(weight).to(torch.bfloat16)
        done, total = index + 1, len(fields.tensors)
        report(ProgressReport("convert", done, total, "tensors", "converting weights"))
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # it has no OSError of its own: a full disk
        raise OSError(str(error)) from error
    (folder / "model.safetensors").chmod(0o644)  # as the other files; it makes 0600


def _name(path: Path, name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _INNER:
            return f"model.layers.{layer}.{_INNER[part]}.weight"
        case _:
            raise BrokenModel(path, f"holds a tensor of no Llama model: {name}")


def _config(fields: GgufFile, *, tied: bool) -> dict[str, object]:
    heads: int = fields["llama.attention.head_count"]
    hidden: int = fields["llama.embedding_length"]
    eps = fields.decimal("llama.attention.layer_norm_rms_epsilon")
    theta = fields.decimal("llama.rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": eps,
        "rope_scaling": None,
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        **_special_ids(fields),
    }


def _special_ids(fields: GgufFile) -> dict[str, int]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _control_tokens(fields: GgufFile) -> list[str]:
    kinds = fields["tokenizer.ggml.token_type"]
    tokens = fields["tokenizer.ggml.tokens"]
    return [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]


def _tokenizer(fields: GgufFile) -> Tokenizer:
    """Byte-level BPE over single digits: what "smollm" and "gpt2" stand for."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges: list[str] = fields["tokenizer.ggml.merges"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, right = merge.split(" ")
        pairs.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(
                add_prefix_space=bool(fields.find("tokenizer.ggml.add_space_prefix")),
                use_regex=True,
            ),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in _control_tokens(fields)
        ]
    )
    return tokenizer


def _tokenizer_config(fields: GgufFile) -> dict[str, object]:
    tokens = fields["tokenizer.ggml.tokens"]

    def token(role: str) -> str:
        return tokens[fields[f"tokenizer.ggml.{role}_token_id"]]

    return {
        "add_bos_token": fields["tokenizer.ggml.add_bos_token"],
        "add_prefix_space": bool(fields.find("tokenizer.ggml.add_space_prefix")),
        "additional_special_tokens": [
            t for t in (token("bos"), token("eos")) if t in _control_tokens(fields)
        ],
        "bos_token": token("bos"),
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": token("eos"),
        "model_max_length": fields["llama.context_length"],
        "pad_token": token("padding"),
        # takes tokenizer.json as it is; model classes rebuild parts of it
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": token("unknown"),
    }


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
