"""What of vLLM's configuration is refused, and whose blocks are whose."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.connect.prefix_plan import Claim, Geometry, Group
from kvtide.connect.settings import ConnectSettings
from kvtide.connect.vllm_facts import (
    SALTED,
    Claims,
    check_config,
    engine_spaces,
    geometry,
    served_facts,
    shapes,
)
from kvtide.kv import ModelFacts
from kvtide.runtime import ConfigError


class FullAttentionSpec(SimpleNamespace):
    """Named as vLLM's."""


class SlidingWindowSpec(SimpleNamespace):
    """Named as vLLM's."""


class MambaSpec(SimpleNamespace):
    """Named as vLLM's."""


def group(spec: object, layers: int = 2) -> SimpleNamespace:
    names = [f"layer {i}" for i in range(layers)]
    return SimpleNamespace(kv_cache_spec=spec, layer_names=names)


FULL = FullAttentionSpec(block_size=32, page_size_bytes=1024, num_kv_heads=2)
WINDOW = SlidingWindowSpec(block_size=16, page_size_bytes=512, sliding_window=64)


def config(model: Path | None = None, **changes: object) -> Any:
    parts: dict[str, dict[str, object]] = {
        "kv_transfer_config": {"kv_load_failure_policy": "recompute"},
        "cache_config": {
            "prefix_caching_hash_algo": "sha256",
            "kv_cache_layout": "LBHNC",
            "cache_dtype": "auto",
            "kv_cache_dtype_skip_layers": [],
        },
        "parallel_config": {"tensor_parallel_size": 2, "pipeline_parallel_size": 1},
        "model_config": {
            "model": str(model),
            "dtype": "float32",
            "quantization": None,
            "hf_config": SimpleNamespace(to_dict=lambda: {"layers": 2}),
        },
        "device_config": {"device_type": "cpu"},
    }
    for each in parts.values():
        each.update({key: value for key, value in changes.items() if key in each})
    made = {name: SimpleNamespace(**each) for name, each in parts.items()}
    return SimpleNamespace(**made)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"prefix_caching_hash_algo": "xxhash"}, "--prefix-caching-hash-algo"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(
    changes: dict[str, Any], said: str
) -> None:
    check_config(config())
    with pytest.raises(ConfigError, match=said):
        check_config(config(**changes))


def test_groups_become_a_geometry_or_are_refused() -> None:
    caches = SimpleNamespace(kv_cache_groups=[group(FULL), group(WINDOW, 3)])
    expected = Geometry((Group(32), Group(16, 64)), hash_tokens=16, unit_tokens=32)
    assert geometry(caches, 32, 16) == expected
    assert [each.nbytes for each in shapes(caches)] == [2048, 1536]
    mamba = SimpleNamespace(kv_cache_groups=[group(MambaSpec(block_size=32))])
    with pytest.raises(ConfigError, match="MambaSpec"):
        geometry(mamba, 32, 32)


def test_spaces_differ_by_rank_group_numbers_and_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    caches = SimpleNamespace(kv_cache_groups=[group(FULL), group(WINDOW)])
    settings = ConnectSettings(state_dir=tmp_path / "state")

    def spaces(rank: int = 0, **changes: Any) -> tuple[object, ...]:
        made = config(tmp_path, **changes)
        return engine_spaces(made, caches, settings, "0.32.0", rank, 0)

    first = spaces()
    assert spaces() == first
    others = [spaces(1), spaces(dtype="bfloat16"), spaces(quantization="fp8")]
    # to the spec both are bytes
    others += [spaces(cache_dtype=kind) for kind in ("fp8_e4m3", "fp8_e5m2")]
    others.append(spaces(kv_cache_dtype_skip_layers=["1"]))
    weights.write_bytes(b"two!")
    others.append(spaces())
    caches = SimpleNamespace(kv_cache_groups=[group(FULL, 3), group(WINDOW, 3)])
    others.append(spaces())
    # a field of the spec that nothing here knows
    marked = [SimpleNamespace(**vars(each), quant_mode=2) for each in (FULL, WINDOW)]
    caches = SimpleNamespace(kv_cache_groups=[group(each, 3) for each in marked])
    others.append(spaces())
    every = [space for found in (first, *others) for space in found]
    assert len(set(every)) == 2 * (1 + len(others))
    with pytest.raises(ConfigError, match="model_digest"):
        engine_spaces(config(tmp_path / "none"), caches, settings, "0.32.0", 0, 0)


@pytest.mark.parametrize(("rank", "leader"), [(0, 0), (0, 1), (1, 0)])
def test_one_place_has_the_keys_that_gateways_derive(rank: int, leader: int) -> None:
    caches = SimpleNamespace(kv_cache_groups=[group(FULL), group(WINDOW)])
    settings = ConnectSettings(model_digest="d")
    found = engine_spaces(config(), caches, settings, "0.32.0", rank, leader)
    adopts = [number for number, space in enumerate(found) if space.adopts]
    assert adopts == ([leader] if rank == 0 else [])


class About(SimpleNamespace):
    """What vLLM knows of a model."""

    def get_num_layers(self, parallel: object) -> int:
        del parallel
        return 6

    def get_total_num_kv_heads(self) -> int:
        return 2

    def get_head_size(self) -> int:
        return 64

    def get_vocab_size(self) -> int:
        return 100

    def try_get_generation_config(self) -> dict[str, object]:
        return {"eos_token_id": [3, 2]}


def announced(
    attending: int | None, least: int = 16, *, one_group: bool = False
) -> ModelFacts:
    """What a worker announces whose smallest blocks have ``least`` tokens."""
    made = config()
    made.model_config = About(
        model="m",
        dtype="float32",
        quantization=None,
        max_model_len=4096,
        hf_config=SimpleNamespace(to_dict=dict),
        hf_text_config=SimpleNamespace(),
    )
    made.cache_config = SimpleNamespace(block_size=least, cache_dtype="auto")
    made.scheduler_config = SimpleNamespace(disable_hybrid_kv_cache_manager=one_group)
    return served_facts(made, "0.32.0", "d", attending)


def test_a_worker_announces_blocks_of_the_group_that_gateways_know() -> None:
    assert announced(16).block_tokens == 16
    assert announced(32).block_tokens == 32
    # none attends to all, and blocks that the pool has not
    assert announced(None).block_tokens == announced(48).block_tokens == 16
    assert announced(16).eos_token_ids == (2, 3)
    with pytest.raises(ConfigError, match="block size 48 must be a power of two"):
        announced(48, least=48)
    # all layers in one group: blocks of other bytes, so another kind of worker
    assert announced(16) != announced(16, one_group=True)


def test_where_a_model_lies_is_no_part_of_its_blocks_names(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    spec = SimpleNamespace(block_size=16)
    caches = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["0"])]
    )
    settings = ConnectSettings(model_digest="d", state_dir=tmp_path)

    def at(path: str, library: str, layers: int = 2) -> object:
        told = {
            "_name_or_path": path,
            "transformers_version": library,
            "layers": layers,
        }
        hf_config = SimpleNamespace(to_dict=lambda: {"text_config": told, **told})
        made = config(tmp_path, hf_config=hf_config)
        return engine_spaces(made, caches, settings, "0.32.0", 0, 0)

    assert at("/data/m", "5.19.0") == at("/mnt/m", "5.20.0")
    assert at("/data/m", "5.19.0") != at("/data/m", "5.19.0", layers=3)


def test_a_claim_is_the_salt_and_the_adapters_content(tmp_path: Path) -> None:
    claims = Claims()
    plain = SimpleNamespace(lora_request=None, cache_salt=None)
    salted = SimpleNamespace(lora_request=None, cache_salt="me")
    assert claims.of(plain) == Claim()
    assert claims.of(salted) == Claim("me")
    (tmp_path / "adapter.safetensors").write_bytes(b"weights")
    lora = SimpleNamespace(lora_int_id=1, lora_name="a", lora_path=str(tmp_path))
    adapted = SimpleNamespace(lora_request=lora, cache_salt="me")
    first = claims.of(adapted)
    assert first is not None
    assert first.tenant == "me"
    assert first.adapter
    (tmp_path / "adapter.safetensors").write_bytes(b"others!")
    # which of the two vLLM has in memory is not known
    assert claims.of(adapted) is None
    again = SimpleNamespace(**{**vars(lora), "lora_int_id": 2})
    changed = claims.of(SimpleNamespace(lora_request=again, cache_salt="me"))
    assert changed is not None
    assert changed.adapter != first.adapter
    (tmp_path / "adapter.safetensors").write_bytes(b"weights")
    assert claims.of(adapted) is None
    nowhere = SimpleNamespace(lora_int_id=3, lora_name="b", lora_path="hub/name")
    assert claims.of(SimpleNamespace(lora_request=nowhere, cache_salt="")) is None


def test_nothing_of_before_is_claimed_after_a_reset(tmp_path: Path) -> None:
    (tmp_path / "adapter.safetensors").write_bytes(b"weights")
    lora = SimpleNamespace(lora_int_id=1, lora_name="a", lora_path=str(tmp_path))
    requests = [
        SimpleNamespace(lora_request=adapter, cache_salt=salt)
        for adapter in (None, lora)
        for salt in (None, "me", f"me{SALTED}mine")
    ]
    one, other = Claims(), Claims()
    before = [one.of(request) for request in requests]
    assert before == [other.of(request) for request in requests]
    one.renew()
    renewed = [one.of(request) for request in requests]
    assert renewed == [one.of(request) for request in requests]
    other.renew()
    others = [other.of(request) for request in requests]
    one.renew()
    seen = {*before, *renewed, *others, *(one.of(request) for request in requests)}
    assert None not in seen
    assert len(seen) == 4 * len(requests)
    # still each tenant's own
    assert [claim and claim.tenant for claim in before] == [
        claim and claim.tenant for claim in renewed
    ]
    (tmp_path / "adapter.safetensors").write_bytes(b"others!")
    assert one.of(requests[-1]) is None
    one.renew()
    assert one.of(requests[-1]) is not None
