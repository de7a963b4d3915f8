"""A model folder around a GGUF file: what gateways and workers read beside weights."""

import json
import shutil
import tempfile
from pathlib import Path

from blake3 import blake3

from kvtide.engine.errors import ModelUnavailable, UnsupportedModel
from kvtide.engine.gguf_file import GgufFile
from kvtide.engine.gguf_text import tokenizer_config, tokenizer_of

WEIGHTS = "weights.gguf"
"""A link to the file, which is not copied."""

LAYOUT = 1
"""Changes whenever the same GGUF file would get another folder."""

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # Mistral's files have this name too
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ENDS = ("eos", "eot")


def is_gguf(path: Path) -> bool:
    """Whether this is a file that would be read as GGUF."""
    return path.suffix == ".gguf" and path.is_file()


def ensure_gguf_folder(path: Path, cache_dir: Path) -> Path:
    """Return a folder with config and tokenizer from the file's metadata; blocking.

    It is made in the cache once for a file of this content, and appears complete or not
    at all. Weights are read from the file itself.

    Raises:
        BrokenModel: it is no GGUF file, or cut short.
        UnsupportedModel: its model or tokenizer can't be served exactly.
        ModelUnavailable: the cache can't be written.
    """
    path = path.resolve()
    file = GgufFile(path)
    content = blake3(max_threads=blake3.AUTO)
    content.update_mmap(path)
    models = cache_dir.expanduser() / "models"
    target = models / f"{path.stem}-gguf{LAYOUT}-{content.hexdigest()[:16]}"
    if (target / WEIGHTS).exists() and (target / "tokenizer.json").exists():
        return target
    config = config_of(file)
    try:
        models.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".gguf-", dir=models) as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            _write(made / "config.json", config)
            ends = {"eos_token_id": config["eos_token_id"]}
            _write(made / "generation_config.json", ends)
            _write(made / "tokenizer_config.json", tokenizer_config(file))
            tokenizer_of(file).save(str(made / "tokenizer.json"))
            (made / WEIGHTS).symlink_to(path)
            # another process may have made the same meanwhile, or the file has moved
            shutil.rmtree(target, ignore_errors=True)
            made.rename(target)
    except OSError as error:
        reason = f"its folder can't be made in {models} ({error.strerror or error})"
        raise ModelUnavailable(str(path), reason) from error
    return target


def config_of(file: GgufFile) -> dict[str, object]:
    """`config.json` for the file's model.

    Raises:
        BrokenModel: a field is missing.
        UnsupportedModel: it can't be served exactly.
    """
    source = str(file.path)
    kind = file["general.architecture"]
    if kind not in _ARCHITECTURES:
        served = ", ".join(_ARCHITECTURES)
        raise UnsupportedModel(
            source, f"its architecture is {kind!r}; served from GGUF are {served}"
        )
    _refuse_unservable(file, kind)
    hidden = file.integer(f"{kind}.embedding_length")
    heads = file.integer(f"{kind}.attention.head_count")
    head_dim = file.find(f"{kind}.attention.key_length") or hidden // heads
    rotated = file.find(f"{kind}.rope.dimension_count")
    if rotated not in (None, head_dim):
        raise UnsupportedModel(source, "it rotates only a part of each head")
    biased = "blk.0.attn_q.bias" in file.tensors
    return {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "attention_bias": biased and kind != "qwen2",
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": file.integer(f"{kind}.feed_forward_length"),
        "max_position_embeddings": file.integer(f"{kind}.context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": file.integer(f"{kind}.block_count"),
        "num_key_value_heads": file.find(f"{kind}.attention.head_count_kv") or heads,
        "rms_norm_eps": file.decimal(f"{kind}.attention.layer_norm_rms_epsilon"),
        "rope_theta": _theta(file, kind),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": file.shape("token_embd.weight")[0],
        "eos_token_id": _ends(file),
    }


def _refuse_unservable(file: GgufFile, kind: str) -> None:
    reason = ""
    window = file.find(f"{kind}.attention.sliding_window")
    if window and window < file.integer(f"{kind}.context_length"):
        reason = "it uses sliding-window attention; only full attention is served"
    elif file.find(f"{kind}.expert_count"):
        reason = "it is a mixture of experts"
    elif "rope_freqs.weight" in file.tensors:
        reason = (
            "its RoPE frequencies are rescaled by a table (Llama 3.1 and later); serve"
            " its safetensors instead"
        )
    elif file.find(f"{kind}.rope.scaling.type") not in (None, "none"):
        reason = "its RoPE is scaled; serve its safetensors instead"
    elif "token_embd.weight" not in file.tensors:
        reason = "it has no embedding; is it one of several parts?"
    if reason:
        raise UnsupportedModel(str(file.path), reason)


def _theta(file: GgufFile, kind: str) -> float:
    name = f"{kind}.rope.freq_base"
    return 10_000.0 if file.find(name) is None else file.decimal(name)


def _ends(file: GgufFile) -> list[int]:
    found = (file.find(f"tokenizer.ggml.{end}_token_id") for end in _ENDS)
    return sorted({token for token in found if token is not None})


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
