"""Settings of a prefill worker."""

from pydantic import Field

from kvtide.engine.settings import WorkerSettings
from kvtide.prefill.limits import PrefillLimits, QueueOrder


class PrefillSettings(WorkerSettings):
    """``kvtide prefill``."""

    queue_order: QueueOrder = Field(
        default=QueueOrder.FIRST_COME,
        description="first_come, or slack: the least time left to the target first",
    )
    chunk_tokens: int = Field(
        default=2048,
        ge=1,
        description="most prompt tokens in a step while nobody else wants the engine",
    )
    shared_chunk_tokens: int = Field(
        default=256,
        ge=1,
        description="most prompt tokens in a step beside decode in the same process",
    )
    step_target_ms: float = Field(
        default=6000.0,
        gt=0,
        description="longest step while nobody else wants the engine; chunks fit into it",
    )
    shared_step_target_ms: float = Field(
        default=250.0,
        gt=0,
        description="longest step beside decode in the same process",
    )
    batch_tokens: int = Field(
        default=256,
        ge=0,
        description="prompts that fit together into this many tokens share a step",
    )
    max_queued: int = Field(
        default=64, ge=1, le=65_536, description="prompts that may wait"
    )
    max_queued_tokens: int = Field(
        default=262_144, ge=1, description="tokens of prompts that may wait"
    )
    load_timeout_s: float = Field(
        default=10.0, gt=0, description="longest wait for a reused prefix"
    )

    def limits(self) -> PrefillLimits:
        """The machine's bounds."""
        return PrefillLimits(
            order=self.queue_order,
            queued=self.max_queued,
            queued_tokens=self.max_queued_tokens,
            jobs=4 * self.max_queued,
            step_tokens=self.chunk_tokens,
            shared_step_tokens=min(self.shared_chunk_tokens, self.chunk_tokens),
            step_ms=self.step_target_ms,
            shared_step_ms=self.shared_step_target_ms,
            batch_tokens=self.batch_tokens,
        )
