"""How a conductor serves, beside where it places: what it is told by its settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtide.conductor.quota import TenantQuota
from kvtide.conductor.reducers.roles import RoleRules
from kvtide.kv import TenantId
from kvtide.policy import Prediction
from kvtide.policy.class_costs import ClassProfile


@dataclass(frozen=True, slots=True)
class ServingRules:
    """``profiles`` are by worker class; that of the class "" is for all others.

    ``calibrated``: predictions of the first token are fitted to when it came.
    """

    prediction: Prediction = Prediction.FITTED
    quotas: Mapping[TenantId, TenantQuota] = field(
        default_factory=dict[TenantId, TenantQuota]
    )
    default_quota: TenantQuota = field(default_factory=TenantQuota)
    roles: RoleRules = field(default_factory=RoleRules)
    profiles: Mapping[str, ClassProfile] = field(
        default_factory=dict[str, ClassProfile]
    )
    calibrated: bool = True
