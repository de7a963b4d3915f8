"""From a model folder or hub id to a model that runs."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from blake3 import blake3

from kvtide.engine.accelerator import CPU, choose_device, free_bytes
from kvtide.engine.architecture import Architecture, read_architecture
from kvtide.engine.attention import VARIANT
from kvtide.engine.decoder import Decoder
from kvtide.engine.demo import default_cache_dir
from kvtide.engine.device_memory import DeviceRun
from kvtide.engine.errors import ModelUnavailable, UnsupportedModel
from kvtide.engine.facts import ModelFacts
from kvtide.engine.gguf_folder import ensure_gguf_folder, is_gguf
from kvtide.engine.grammars import Grammars, GrammarVocabulary
from kvtide.engine.heap import return_freed_memory
from kvtide.engine.hub import fetch_from_hub
from kvtide.engine.linear import WeightForm
from kvtide.engine.memory import KvRun
from kvtide.engine.paged_attention import (
    VARIANT as PAGED,
    WORKSPACE_BYTES,
    PagedAttention,
    flashinfer_kernel,
    served,
)
from kvtide.engine.paged_memory import PagedRun, PagePool
from kvtide.engine.progress import Progress, ProgressReport, silent
from kvtide.engine.runner import Runner
from kvtide.engine.tensor_files import weight_files
from kvtide.engine.weights import read_weights
from kvtide.kv import Layout

DEFAULT_BLOCK_TOKENS: Final = 64

_KV_SHARE: Final = 0.8
_ENGINE: Final = "kvtide-lean-1"
_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory: what it is, and what runs it."""

    facts: ModelFacts
    runner: Runner
    grammars: Grammars
    device: torch.device = CPU
    pool: PagePool | None = None

    @property
    def kv_tokens(self) -> int | None:
        """Tokens of KV that fit on the device; None where only the host's memory limits."""
        return None if self.pool is None else self.pool.pages * self.pool.page_tokens

    def new_run(self, capacity_tokens: int) -> KvRun:
        """Make the KV memory of a new sequence; the caller closes it.

        Raises:
            NoPages: the device has no room for it.
        """
        if self.pool is not None:
            return PagedRun(self.facts, capacity_tokens, self.pool)
        if self.device != CPU:
            return DeviceRun(self.facts, capacity_tokens, self.device)
        return KvRun(self.facts, capacity_tokens)

    def close(self) -> None:
        """End what it runs beside the caller; runs are closed by their owners."""
        self.grammars.close()


def load_model(
    source: str | Path,
    *,
    threads: int | None = None,
    cache_dir: Path | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    name: str | None = None,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model from a local folder, a GGUF file or the hub; blocking.

    A GGUF file's weights are dequantised to `dtype`; its config and tokenizer are
    written into `cache_dir` once.

    `dtype` is that of weights, activations and KV; logits are float32 in any case.
    `device` is where weights and KV are; see `accelerator.choose_device`.
    `threads` sets torch's compute threads for the whole process (None leaves them).
    `name` is what clients call it: the hub id or the folder's name unless given.
    `block_tokens` goes into the facts and is one value for a model in a cluster.
    Code from a model repository is never run, and no pickle is opened.

    Raises:
        UnsupportedDevice: the device is not there.
        UnsupportedModel: it can't be served exactly; the message says why.
        BrokenModel: its files are missing or don't fit together.
        ModelUnavailable: there is no such folder and the hub did not give it.
    """
    report = progress or silent
    if dtype not in _DTYPES:
        reason = f"dtype {dtype} is not served; choose {', '.join(_DTYPES)}"
        raise UnsupportedModel(str(source), reason)
    place = choose_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    folder = _folder(source, cache_dir, report)
    architecture = read_architecture(folder, str(source))

    def on_layer(layer: int) -> None:
        message = f"loading {folder.name}"
        layers = architecture.layers
        report(ProgressReport("load", layer + 1, layers, "layers", message))

    weights = read_weights(folder, architecture, _DTYPES[dtype], on_layer, place)
    return_freed_memory()
    paged = served(place, _DTYPES[dtype], architecture.head_dim)
    facts = ModelFacts(
        name=name or _name(source, folder),
        digest=_digest((folder / "config.json", *weight_files(folder))),
        layers=architecture.layers,
        kv_heads=architecture.kv_heads,
        head_dim=architecture.head_dim,
        kv_dtype=dtype,
        vocab_size=architecture.vocab_size,
        max_tokens=architecture.max_tokens,
        eos_token_ids=architecture.eos_token_ids,
        numerics=_numerics(
            architecture, weights.form, dtype, place, PAGED if paged else VARIANT
        ),
        block_tokens=block_tokens,
    )
    pool = _pool(facts, place) if paged else None
    attention = pool and _attention(pool, architecture, _DTYPES[dtype])
    decoder = Decoder(architecture, weights, _DTYPES[dtype], place, attention)
    vocabulary = GrammarVocabulary(
        folder / "tokenizer.json", facts.vocab_size, facts.eos_token_ids
    )
    runner, grammars = Runner(decoder, facts), Grammars(vocabulary)
    return LoadedModel(facts, runner, grammars, place, pool)


def _attention(
    pool: PagePool, architecture: Architecture, dtype: torch.dtype
) -> PagedAttention:
    kernel = flashinfer_kernel(pool.device)
    return PagedAttention(kernel, pool, architecture, dtype)


def _pool(facts: ModelFacts, device: torch.device) -> PagePool:
    """Pages of one block each, for a share of what is free beside the weights."""
    layout = Layout.of(facts)
    page_bytes = layout.parts * layout.token_bytes * facts.block_tokens
    share = _KV_SHARE * (free_bytes(device) - WORKSPACE_BYTES)
    pages = max(1, int(share) // page_bytes)
    return PagePool(facts, pages, facts.block_tokens, device)


def _folder(source: str | Path, cache_dir: Path | None, report: Progress) -> Path:
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if is_gguf(folder):
        message = f"reading {folder.name}"
        report(ProgressReport("convert", 0, 0, "files", message))
        return ensure_gguf_folder(folder, cache_dir or default_cache_dir())
    if folder.is_file():
        reason = (
            "it is a file, and no .gguf; give the folder that holds it and config.json"
        )
        raise ModelUnavailable(str(source), reason)
    if isinstance(source, Path) or not _HUB_ID.fullmatch(source):
        reason = "there is no such folder, and it is not a hub id (OWNER/NAME)"
        raise ModelUnavailable(str(source), reason)
    report(ProgressReport("download", 0, 0, "files", f"fetching {source} from the hub"))
    return fetch_from_hub(source, cache_dir)


def _name(source: str | Path, folder: Path) -> str:
    if Path(source).expanduser() == folder:
        return folder.resolve().name
    if is_gguf(Path(source).expanduser()):
        return Path(source).stem
    return str(source)


def _digest(files: tuple[Path, ...]) -> str:
    """Name, size and content of each file, every part length-prefixed."""
    whole = blake3()
    for path in files:
        name = path.name.encode()
        content = blake3(max_threads=blake3.AUTO)
        content.update_mmap(path)
        whole.update(len(name).to_bytes(8, "little") + name)
        whole.update(path.stat().st_size.to_bytes(8, "little") + content.digest())
    return whole.hexdigest()


def _numerics(
    architecture: Architecture,
    form: WeightForm,
    dtype: str,
    device: torch.device,
    attention: str,
) -> str:
    release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    return (
        f"compute={dtype};weights={form};attention={attention};"
        f"{architecture.rope.canonical()};engine={_ENGINE};torch={release}"
        f";device={device.type}"
    )
