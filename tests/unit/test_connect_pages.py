"""Whole pages of an engine's tensors, and the digest of its model."""

from pathlib import Path

import pytest
import torch

from kvtide.connect.model_digest import folder_digest
from kvtide.connect.pages import Pages
from kvtide.runtime import ConfigError


def layer(blocks: int = 3) -> torch.Tensor:
    """A layer as vLLM has it on a CPU: [block, head, token, K and V]."""
    return torch.arange(blocks * 2 * 4 * 8, dtype=torch.float32).reshape(
        blocks, 2, 4, 8
    )


def test_a_page_is_a_blocks_memory_as_it_lies() -> None:
    layers = [layer(), layer().neg()]
    pages = Pages(layers, torch.uint8)
    assert (pages.shape.pieces, pages.shape.piece_bytes, pages.blocks) == (2, 256, 3)
    assert bytes(pages.pieces(1)[1]) == layers[1][1].numpy().tobytes()
    saved = [bytes(piece) for piece in pages.pieces(1)]
    pages.put(2, [memoryview(piece) for piece in saved])
    assert all(torch.equal(each[2], each[1]) for each in layers)
    assert all(
        torch.equal(each[0], layers[0][0] * sign)
        for each, sign in zip(layers, (1, -1), strict=True)
    )


def test_the_order_within_a_page_is_the_engines() -> None:
    # token before head in memory, head before token in the shape
    kept = torch.arange(2 * 4 * 2 * 8, dtype=torch.float32).reshape(2, 4, 2, 8)
    pages = Pages([kept.transpose(1, 2)], torch.uint8)
    assert bytes(pages.pieces(1)[0]) == kept[1].numpy().tobytes()


def test_a_block_in_shreds_is_refused() -> None:
    shreds = torch.zeros(2, 3, 4, 8).transpose(0, 1)
    with pytest.raises(ConfigError, match="not contiguous"):
        Pages([shreds], torch.uint8)
    with pytest.raises(ConfigError, match="only equal ones"):
        Pages([layer(), torch.zeros(3, 2, 4, 4)], torch.uint8)


def test_a_models_digest_is_of_its_content(tmp_path: Path) -> None:
    model, kept = tmp_path / "model", tmp_path / "kept"
    model.mkdir()
    with pytest.raises(ConfigError, match="no weights"):
        folder_digest(model)
    (model / "config.json").write_text("{}")
    (model / "a.safetensors").write_bytes(b"weights")
    (model / "README.md").write_text("no part of it")
    first = folder_digest(model, kept)
    assert folder_digest(model, kept) == folder_digest(model) == first
    assert len(list(kept.iterdir())) == 1
    (model / "README.md").write_text("still none")
    assert folder_digest(model, kept) == first
    (model / "a.safetensors").write_bytes(b"weightS")
    assert folder_digest(model, kept) != first
    first = folder_digest(model, kept)
    (model / "modeling_own.py").write_text("scale = 2")
    assert folder_digest(model, kept) != first
    with pytest.raises(ConfigError, match="can't be read"):
        folder_digest(tmp_path / "none")
