"""Settings of an engine's agent."""

from pathlib import Path

from pydantic import Field

from kvtide.router.asking import EngineKind
from kvtide.runtime.settings import RoleSettings

_ZMQ = r"^$|^(tcp|ipc)://\S+$"


class RouterSettings(RoleSettings):
    """``kvtide router``: an engine that runs already becomes a worker."""

    url: str = Field(
        pattern=r"^https?://[^\s/]+(/[^\s]*)?$",
        description="where the engine answers, such as http://gpu-1:8000",
    )
    kind: EngineKind = Field(
        default=EngineKind.VLLM, description="whose server it is: vllm or sglang"
    )
    model: Path = Field(
        description="folder with the model's config.json, as the gateway has it"
    )
    model_name: str = Field(
        default="",
        description="the model's name for clients; empty: the folder's name",
    )
    engine_model: str = Field(
        default="",
        description="the model's name at the engine; empty: the only one it serves",
    )
    engine_key: str = Field(
        default="", description="API key that the engine asks for; empty: none"
    )
    events: str = Field(
        default="",
        pattern=_ZMQ,
        description="where the engine publishes KV events, such as tcp://gpu-1:5557; "
        "empty: its cache is not known, and load alone decides",
    )
    replay: str = Field(
        default="",
        pattern=_ZMQ,
        description="where the engine repeats KV events, such as tcp://gpu-1:5558; "
        "empty: a gap in them forgets what was known",
    )
    topic: str = Field(default="", description="topic of the KV events; empty: all")
    block_tokens: int = Field(
        default=0,
        ge=0,
        description="tokens in a block of the index, a multiple of the engine's; equal "
        "for all engines of a model; 0: the engine's own, but 64 at least",
    )
    worker_class: str = Field(
        default="",
        description="engines of one class are taken for equally fast; empty: all that "
        "serve this model",
    )
    max_open: int = Field(
        default=1024, ge=1, description="requests at a time that the engine is given"
    )
    poll_s: float = Field(
        default=0.5, gt=0, le=10, description="how often /metrics is read"
    )
    away_s: float = Field(
        default=5.0,
        gt=0,
        description="an engine that has not answered for so long is away",
    )
    start_s: float = Field(
        default=600.0,
        gt=0,
        description="how long an engine that does not answer yet is waited for",
    )
    drain_s: float = Field(
        default=30.0, ge=0, description="how long running requests may take to end"
    )
