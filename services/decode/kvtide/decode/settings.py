"""Settings of a decode worker."""

from pydantic import Field

from kvtide.decode.limits import DecodeLimits
from kvtide.engine.settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    """``kvtide decode``."""

    kv_tokens: int = Field(
        default=0,
        ge=0,
        description="tokens of KV that fit into memory; 0: a share of what is free",
    )
    kv_memory_share: float = Field(
        default=0.25,
        gt=0,
        le=0.95,
        description="share of the free memory that KV may take if kv_tokens is 0",
    )
    batch: int = Field(
        default=32, ge=1, le=4096, description="sequences that hold memory at a time"
    )
    growth_blocks: int = Field(
        default=2,
        ge=0,
        description="blocks of memory bound beyond what a sequence has when it begins",
    )
    max_waiting: int = Field(
        default=256, ge=1, le=65_536, description="requests that may wait for memory"
    )
    max_open_picture_bytes: int = Field(
        default=1 << 29,
        ge=1 << 20,
        description="bytes that the pictures of all open requests may take",
    )
    fill_tokens: int = Field(
        default=64,
        ge=16,
        description="tokens of a missing prefix computed in a step beside others",
    )
    fill_alone_tokens: int = Field(
        default=512,
        ge=16,
        description="tokens of a missing prefix computed in a step when nothing runs",
    )
    read_timeout_s: float = Field(
        default=10.0, gt=0, description="longest wait for a read from the pool"
    )
    silence_s: float = Field(
        default=0.5,
        gt=0,
        description="silence of prefill after which its state is asked for",
    )

    def limits(self) -> DecodeLimits:
        """The machine's bounds."""
        return DecodeLimits(
            waiting=self.max_waiting,
            batch=self.batch,
            picture_bytes=self.max_open_picture_bytes,
            growth_blocks=self.growth_blocks,
            fill_tokens=self.fill_tokens,
            fill_alone_tokens=self.fill_alone_tokens,
            silence_s=self.silence_s,
        )
