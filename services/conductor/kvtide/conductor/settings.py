"""Settings of a conductor."""

from enum import StrEnum

from pydantic import Field

from kvtide.conductor.reducers.replication import ReplicationRules
from kvtide.policy import (
    BalancingRatio,
    CostSeeds,
    LeastTtft,
    PlacementPolicy,
    Targets,
)
from kvtide.runtime.settings import RoleSettings


class PolicyName(StrEnum):
    """How requests are placed."""

    LEAST_TTFT = "least_ttft"
    BALANCING_RATIO = "balancing_ratio"


class ConductorSettings(RoleSettings):
    """``kvtide conductor``."""

    policy: PolicyName = Field(
        default=PolicyName.LEAST_TTFT,
        description="placement policy: smallest predicted time to first token, or "
        "the published Algorithm 1 with its balancing ratio",
    )
    balancing_ratio: float = Field(
        default=2.0,
        ge=1.0,
        description="how many times longer than a worker's own prefix another must be "
        "to be transferred (policy balancing_ratio)",
    )
    direct_blocks: int = Field(
        default=1,
        ge=0,
        description="uncached blocks that a decode worker may compute by itself "
        "instead of a prefill worker (policy least_ttft)",
    )
    max_queue_ms: float = Field(
        default=120_000.0,
        gt=0,
        description="longest predicted wait of a request that is taken, in milliseconds",
    )
    ttft_ms: float | None = Field(
        default=None,
        gt=0,
        description="target for the time to first token of requests that name none",
    )
    tbt_ms: float | None = Field(
        default=None,
        gt=0,
        description="target for the time between tokens of requests that name none",
    )
    assumed_tokens_per_s: float = Field(
        default=1000.0,
        gt=0,
        description="prefill speed of a worker that has measured none yet",
    )
    assumed_load_bytes_per_s: float = Field(
        default=1e9,
        gt=0,
        description="speed of loading blocks at a worker that has measured none yet",
    )
    remote_share: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="speed of loading from another host, as a share of the same host's",
    )
    replicate: bool = Field(
        default=True,
        description="have stores make copies of hot blocks, and fill stores that come",
    )
    replica_copies: int = Field(
        default=4,
        ge=1,
        le=64,
        description="most copies of a block, all stores together",
    )
    replica_hot: float = Field(
        default=4.0,
        gt=0,
        description="placements of a block in its half-life, for each copy that it has, "
        "from which it gets one more",
    )
    replica_half_life_s: float = Field(
        default=60.0, gt=0, description="after which a placement counts half"
    )
    replica_bytes_per_s: float = Field(
        default=128e6,
        gt=0,
        description="mean rate at which this conductor orders copies",
    )
    replica_share: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="share of a store's memory that it orders copies for",
    )
    retention_days: float = Field(
        default=30.0,
        gt=0,
        description="how long the catalog keeps decisions and ended requests",
    )

    def replication(self) -> ReplicationRules:
        """When copies are made."""
        return ReplicationRules(
            enabled=self.replicate,
            half_life_s=self.replica_half_life_s,
            hot=self.replica_hot,
            copies=self.replica_copies,
            balancing_ratio=self.balancing_ratio,
            bytes_per_s=self.replica_bytes_per_s,
            extra_share=self.replica_share,
        )

    def placement(self) -> PlacementPolicy:
        """The policy that these settings choose."""
        seeds = CostSeeds(
            tokens_per_s=self.assumed_tokens_per_s,
            load_bytes_per_s=self.assumed_load_bytes_per_s,
            remote_share=self.remote_share,
        )
        targets = Targets(self.max_queue_ms, self.ttft_ms, self.tbt_ms)
        match self.policy:
            case PolicyName.LEAST_TTFT:
                return LeastTtft(seeds, targets, direct_blocks=self.direct_blocks)
            case PolicyName.BALANCING_RATIO:
                ratio = self.balancing_ratio
                return BalancingRatio(seeds, targets, balancing_ratio=ratio)
