"""Which of vLLM's options and adapters a worker takes."""

import json
from pathlib import Path

import pytest

from kvtide.connect.vllm_worker.settings import VllmSettings
from kvtide.runtime import ConfigError


def test_adapters_are_folders_and_turn_vllms_own_option_on(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("b", "a")}
    for folder in folders.values():
        folder.mkdir()
    lora = json.dumps({name: str(folder) for name, folder in folders.items()})
    settings = VllmSettings(lora=lora, vllm_options='{"max_lora_rank": 64}')
    assert settings.adapters() == folders
    # all workers number them alike
    assert list(settings.adapters()) == ["a", "b"]
    assert settings.options() == {"enable_lora": True, "max_lora_rank": 64}
    assert VllmSettings().options() == {}


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ("{", "lora: no JSON"),
        ("[]", "lora must be an object"),
        ('{"a": 1}', "must name a folder"),
        ('{"a": "/nowhere"}', "lora a: there is no folder /nowhere"),
    ],
)
def test_adapters_that_cannot_be_are_refused(lora: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        VllmSettings(lora=lora).options()


def test_what_the_worker_sets_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="can't set model"):
        VllmSettings(vllm_options='{"model": "m"}').options()
