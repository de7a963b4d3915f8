"""``kvtide fetch-model``: makes the model ready, for images and volumes."""

from pathlib import Path

from rich.console import Console

from kvtide.cli.roles import UP, schemas
from kvtide.cli.settings import UpSettings
from kvtide.cli.supervisor.model import prepare_model
from kvtide.runtime.settings import load_settings


def fetch_model(config: Path | None, cache_dir: str | None, console: Console) -> None:
    """Fetch, and in the demo's case convert, the model; print its folder.

    Raises:
        KvtideError: see ``prepare_model``.
    """
    settings, _ = load_settings(
        UpSettings,
        UP,
        flags={"cache_dir": cache_dir},
        toml_path=config,
        schemas=schemas(),
    )
    folder = prepare_model(settings, console).folder
    console.print(str(folder), markup=False, highlight=False, soft_wrap=True)
