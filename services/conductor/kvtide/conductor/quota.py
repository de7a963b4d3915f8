"""What a tenant may use."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """A tenant's limits; None is no limit."""

    requests_per_min: float | None = None
    tokens_per_min: float | None = None
    concurrent_requests: int | None = None


NO_QUOTA = TenantQuota()
