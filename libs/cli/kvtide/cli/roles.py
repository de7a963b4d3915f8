"""The roles that this command runs, by name; nothing of them is imported before use."""

import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

from pydantic import BaseModel

from kvtide.cli.settings import UpSettings
from kvtide.connect.vllm_worker.settings import VllmSettings
from kvtide.runtime.settings import RoleSettings
from kvtide.runtime.sources import Schemas

UP = "up"
LOOK = "cli"
"""The settings of commands that only look on: the shared ones."""

VLLM = "vllm"
"""The settings of a worker whose engine is vLLM."""


@dataclass(frozen=True, slots=True)
class RoleEntry:
    """A role: what it is, and where its settings and its ``serve`` are."""

    name: str
    summary: str

    def settings_class(self) -> type[RoleSettings]:
        """Its settings; imports only its ``settings`` module."""
        module = importlib.import_module(f"kvtide.{self.name}.settings")
        return cast(
            "type[RoleSettings]", getattr(module, f"{self.name.capitalize()}Settings")
        )

    def serve(self) -> Callable[..., Awaitable[None]]:
        """Its ``serve``; imports all of it."""
        module = importlib.import_module(f"kvtide.{self.name}.app")
        return cast("Callable[..., Awaitable[None]]", module.serve)


ROLES: dict[str, RoleEntry] = {
    entry.name: entry
    for entry in (
        RoleEntry("gateway", "The public door: OpenAI's API."),
        RoleEntry("conductor", "Places requests on workers."),
        RoleEntry("prefill", "Makes KV: a prefill worker."),
        RoleEntry("decode", "Makes tokens: a decode worker."),
        RoleEntry("store", "Keeps KV blocks: the pool on this host."),
        RoleEntry("router", "Makes a worker of an engine that runs already."),
    )
}


def schemas() -> Schemas:
    """The settings of every role, and of the commands, so that all names are known."""
    known: dict[str, type[BaseModel]] = {
        name: entry.settings_class() for name, entry in ROLES.items()
    }
    return {**known, UP: UpSettings, LOOK: RoleSettings, VLLM: VllmSettings}
