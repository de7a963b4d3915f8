"""Fetching a model folder from the hub, where its client library is installed."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from pathlib import Path

from kvtide.engine.errors import ModelUnavailable

_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "*.safetensors",
    "*.safetensors.index.json",
]


def fetch_from_hub(model_id: str, cache_dir: Path | None) -> Path:
    """Download configuration, tokenizer and safetensors files; return their folder.

    Raises:
        ModelUnavailable: the hub can't be reached, or does not give this model.
    """
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415
        from huggingface_hub.errors import (  # noqa: PLC0415
            HfHubHTTPError,
            LocalEntryNotFoundError,
        )
    except ImportError as error:
        reason = "it is no local folder, and huggingface_hub is not installed"
        raise ModelUnavailable(model_id, reason) from error
    try:
        return Path(
            snapshot_download(
                model_id,
                allow_patterns=_FILES,
                cache_dir=cache_dir and cache_dir / "hub",
            )
        )
    except LocalEntryNotFoundError as error:
        reason = "the hub can't be reached; give a local folder instead"
        raise ModelUnavailable(model_id, reason) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelUnavailable(model_id, str(error).splitlines()[0]) from error
