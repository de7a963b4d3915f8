"""Settings of a conductor."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from kvtide.conductor.profiles import load_profiles
from kvtide.conductor.quota import TenantQuota
from kvtide.conductor.reducers.replication import ReplicationRules
from kvtide.conductor.reducers.roles import RoleRules
from kvtide.conductor.serving import ServingRules
from kvtide.kv import TenantId
from kvtide.policy import (
    ColumnPolicy,
    CostSeeds,
    PolicyName,
    Prediction,
    Targets,
    TenantTargets,
    rules_of,
)
from kvtide.runtime.settings import RoleSettings


class TenantSettings(BaseModel):
    """What is set for one tenant; None is the default, or no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_ms: float | None = Field(default=None, gt=0)
    tbt_ms: float | None = Field(default=None, gt=0)
    requests_per_min: float | None = Field(default=None, gt=0)
    tokens_per_min: float | None = Field(default=None, gt=0)
    concurrent_requests: int | None = Field(default=None, ge=1)

    @property
    def limited(self) -> bool:
        """Whether any quota is set."""
        return self.quota() != TenantQuota()

    def quota(self) -> TenantQuota:
        """The quotas."""
        return TenantQuota(
            self.requests_per_min, self.tokens_per_min, self.concurrent_requests
        )


class ConductorSettings(RoleSettings):
    """``kvtide conductor``."""

    policy: PolicyName = Field(
        default=PolicyName.BEST,
        description="placement policy: best (earliest predicted end of the answer), "
        "algorithm1 (published, with its balancing ratio), or one to compare with: "
        "local_cache_aware, least_loaded, round_robin, random",
    )
    balancing_ratio: float = Field(
        default=2.0,
        ge=1.0,
        description="how many times longer than a worker's own prefix another must be "
        "to be transferred (policy algorithm1)",
    )
    direct_blocks: int = Field(
        default=1,
        ge=0,
        description="uncached blocks that a decode worker may compute by itself "
        "instead of a prefill worker (policy best)",
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
    shed_share: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="share of each target that work of a priority below 0 may use",
    )
    early_rejection: bool = Field(
        default=True,
        description="refuse at arrival what decode is predicted to be too slow for",
    )
    prediction: Prediction = Field(
        default=Prediction.FITTED,
        description="how decode's load at the end of a prefill is predicted: fitted "
        "(to answers seen), uniform (all take equally long), off (as it is now)",
    )
    tenants: dict[str, TenantSettings] = Field(
        default_factory=dict[str, TenantSettings],
        description="targets and quotas by tenant, as JSON or a TOML table: ttft_ms, "
        "tbt_ms, requests_per_min, tokens_per_min, concurrent_requests",
    )
    default_quota: TenantSettings = Field(
        default_factory=TenantSettings,
        description="quotas of each tenant that has none of its own",
    )
    quotas_every_s: float = Field(
        default=5.0,
        gt=0,
        description="how often tenants' limits are read from the catalog, where they "
        "come before those of the settings",
    )
    move_roles: bool = Field(
        default=True,
        description="move workers that can do both between prefill and decode when "
        "one of the two stays much more loaded",
    )
    profiles: Path | None = Field(
        default=None,
        description="file with measured costs by worker class, made by kvtide profile",
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
        description="how long the catalog keeps decisions, ended requests and nodes "
        "that are gone",
    )
    removals_retention_days: float = Field(
        default=3.0,
        gt=0,
        description="how long the catalog keeps why blocks went",
    )
    tenants_retention_days: float = Field(
        default=365.0,
        gt=0,
        description="how long the catalog keeps deleted tenants: a store that was down "
        "for longer brings their blocks back",
    )
    audit_retention_days: float = Field(
        default=400.0,
        gt=0,
        description="how long the audit log is kept: who made, used or revoked what",
    )
    prune_every_s: float = Field(
        default=3600.0, gt=0, description="how often what is too old is deleted"
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

    def placement(self) -> ColumnPolicy:
        """The policy that these settings choose."""
        seeds = CostSeeds(
            tokens_per_s=self.assumed_tokens_per_s,
            load_bytes_per_s=self.assumed_load_bytes_per_s,
            remote_share=self.remote_share,
        )
        targets = Targets(
            self.max_queue_ms,
            self.ttft_ms,
            self.tbt_ms,
            shed_share=self.shed_share,
            early=self.early_rejection,
            tenants={
                TenantId(name): TenantTargets(own.ttft_ms, own.tbt_ms)
                for name, own in self.tenants.items()
            },
        )
        rules = rules_of(
            self.policy,
            balancing_ratio=self.balancing_ratio,
            direct_blocks=self.direct_blocks,
        )
        return ColumnPolicy(rules, seeds, targets)

    def serving(self) -> ServingRules:
        """Prediction, quotas and profiles.

        Raises:
            ConfigError: the file of profiles can't be used.
        """
        return ServingRules(
            prediction=self.prediction,
            quotas={
                TenantId(name): own.quota()
                for name, own in self.tenants.items()
                if own.limited
            },
            default_quota=self.default_quota.quota(),
            roles=RoleRules(
                enabled=self.move_roles,
                ttft_ms=self.ttft_ms or RoleRules().ttft_ms,
                tbt_ms=self.tbt_ms or RoleRules().tbt_ms,
            ),
            profiles=load_profiles(self.profiles) if self.profiles else {},
        )
