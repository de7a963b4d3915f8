"""Settings of processes with an engine, and the environment that torch reads early.

Imports no torch: commands that only show or check settings import this, too.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from kvtide.runtime.settings import RoleSettings

DEMO: Final = "demo"
"""The model that is served when none is named."""


def openmp_environment(threads: int | None) -> Mapping[str, str]:
    """The process environment, changed so that torch's threads wait passively.

    Spinning threads of several workers on the same cores cost ten times. OpenMP reads
    these variables when torch is imported, so they must be set for the process that is
    started: pass the result as its environment. `threads=None` leaves the count open.
    """
    changed = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    if threads is not None:
        changed["OMP_NUM_THREADS"] = str(threads)
    return changed


class WorkerSettings(RoleSettings):
    """Settings of a process that runs a model."""

    model: str = Field(
        default=DEMO,
        min_length=1,
        description="a folder, a .gguf file, a hub id, or demo: SmolLM2-135M-Instruct",
    )
    cache_dir: Path = Field(
        default=Path("~/.cache/kvtide"), description="folder for the demo model"
    )
    threads: int = Field(
        default=0, ge=0, le=1024, description="compute threads; 0: all cores"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="number format of weights, activations and KV; one per cluster",
    )
    device: str = Field(
        default="cpu",
        min_length=1,
        description="cpu, auto, or a device of torch's such as cuda or cuda:1",
    )
    worker_class: str = Field(
        default="",
        max_length=64,
        description="name of a class of workers that are equally fast, whose costs "
        "conductors then learn together, and by which profiles know it; empty: it is a "
        "class of its own, by its node's name",
    )
    drain_s: float = Field(
        default=20.0,
        ge=0,
        le=3600,
        description="seconds that running requests get to end after a stop",
    )
