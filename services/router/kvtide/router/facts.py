"""What an engine serves, in the words of the rest. Pure."""

import json
from pathlib import Path
from typing import Any, cast

from blake3 import blake3

from kvtide.kv import ModelFacts
from kvtide.runtime import ConfigError

LEAST_BLOCK_TOKENS = 64
_MOST_BLOCK_TOKENS = 512


def make_facts(
    folder: Path,
    name: str,
    *,
    max_tokens: int,
    engine_block_tokens: int,
    block_tokens: int,
) -> ModelFacts:
    """The facts of a model that engines of others serve.

    Engines whose model has the same name and configuration are taken for equal: nothing
    of their KV is ever exchanged. The numbers of its layout are of no meaning but that a
    block costs nothing to load, for it is where it is used.

    Raises:
        ConfigError: the folder can't be read, or the block size fits no engine's.
    """
    config = _read(folder / "config.json")
    text = config.get("text_config")
    numbers: dict[str, Any] = {**config, **(text if isinstance(text, dict) else {})}
    size = block_tokens or max(LEAST_BLOCK_TOKENS, engine_block_tokens)
    if size > _MOST_BLOCK_TOKENS or size & (size - 1):
        raise ConfigError(
            f"a block of {size} tokens can't be indexed: give a power of two up to "
            f"{_MOST_BLOCK_TOKENS}",
            key="block_tokens",
        )
    if engine_block_tokens and size % engine_block_tokens:
        raise ConfigError(
            f"a block of {size} tokens is no multiple of the engine's "
            f"{engine_block_tokens}",
            key="block_tokens",
        )
    given = json.dumps(config, sort_keys=True).encode()
    return ModelFacts(
        name=name,
        digest=blake3(given).hexdigest(),
        layers=1,
        kv_heads=1,
        head_dim=1,
        kv_dtype="float16",
        vocab_size=int(numbers.get("vocab_size", 0)),
        max_tokens=max_tokens or int(numbers.get("max_position_embeddings", 0)),
        eos_token_ids=_eos(folder, numbers),
        numerics="engine of others",
        block_tokens=size,
        self_contained=True,
    )


def _eos(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    found: Any = _read(path).get("eos_token_id") if path.is_file() else None
    if found is None:
        found = config.get("eos_token_id")
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(sorted(found))


def _read(path: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} can't be read: {error}; 'model' is the model's folder", key="model"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no configuration", key="model")
    return cast("dict[str, Any]", found)
