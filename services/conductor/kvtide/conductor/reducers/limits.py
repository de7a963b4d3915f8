"""What tenants may use: requests and tokens a minute, requests at once.

A tenant's home conductor grants. Grants are idempotent by request and expire; those of
placements that another conductor made are charged here too, so that whoever takes over
as home knows what was used. Tokens that were granted and not used are given back.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from kvtide.kv import RequestId, TenantId

_MIN_S = 60.0
_S_TO_MS = 1000.0
_LEAST_RETRY_MS = 100.0


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """A tenant's limits; None is no limit."""

    requests_per_min: float | None = None
    tokens_per_min: float | None = None
    concurrent_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Denied:
    """Why a request is not granted, and when it may be."""

    reason: str
    retry_after_ms: float | None


@dataclass(slots=True)
class _Bucket:
    """Fills by ``per_s`` up to ``size``; may be in debt for what others granted."""

    size: float
    per_s: float
    level: float
    at_s: float

    def fill(self, now_s: float) -> float:
        passed_s = max(0.0, now_s - self.at_s)
        self.level = min(self.size, self.level + passed_s * self.per_s)
        self.at_s = now_s
        return self.level


@dataclass(slots=True)
class _Account:
    quota: TenantQuota
    requests: _Bucket | None
    tokens: _Bucket | None
    open: int = 0


@dataclass(frozen=True, slots=True)
class _Grant:
    tenant: TenantId
    tokens: int
    at_s: float


class TenantLimits:
    """Token buckets and open requests by tenant. Bounded in number and age."""

    def __init__(
        self,
        quotas: Mapping[TenantId, TenantQuota] | None = None,
        default: TenantQuota | None = None,
        *,
        grant_s: float = 900.0,
        most: int = 200_000,
    ) -> None:
        """``default`` is for tenants without a quota of their own."""
        self._quotas = dict(quotas or {})
        self._default = default or TenantQuota()
        self._grant_s = grant_s
        self._most = most
        self._accounts: OrderedDict[TenantId, _Account] = OrderedDict()
        self._grants: OrderedDict[RequestId, _Grant] = OrderedDict()

    def __len__(self) -> int:
        """Requests that hold a grant."""
        return len(self._grants)

    def open_requests(self, tenant: TenantId) -> int:
        """Requests of a tenant that hold a grant."""
        account = self._accounts.get(tenant)
        return account.open if account is not None else 0

    def replace(self, quotas: Mapping[TenantId, TenantQuota]) -> None:
        """Quotas have changed; what was used of the old ones stays used."""
        self._quotas = dict(quotas)
        for tenant, account in list(self._accounts.items()):
            quota = self._quota(tenant)
            if quota != account.quota:
                renewed = _account(quota, account.requests, account.tokens)
                renewed.open = account.open
                self._accounts[tenant] = renewed

    def grant(
        self, tenant: TenantId, request: RequestId, tokens: int, now_s: float
    ) -> Denied | None:
        """Grant a request; None: it is granted, or was. Denied: nothing was charged."""
        if request in self._grants:
            return None
        account = self._account(tenant, now_s)
        denied = (
            _too_many(account, tenant)
            or _dry(
                account.requests, 1, f"{tenant} has used its requests a minute", now_s
            )
            or _dry(
                account.tokens, tokens, f"{tenant} has used its tokens a minute", now_s
            )
        )
        if denied is None:
            self._charge(account, tenant, request, tokens, now_s)
        return denied

    def heard(
        self, tenant: TenantId, request: RequestId, tokens: int, now_s: float
    ) -> None:
        """Another conductor granted this."""
        if request not in self._grants:
            account = self._account(tenant, now_s)
            self._charge(account, tenant, request, tokens, now_s)

    def release(self, request: RequestId, now_s: float) -> None:
        """Nothing came of the grant: all of it is given back."""
        grant = self._grants.get(request)
        if grant is not None:
            self._close(request, 0, now_s)
            account = self._accounts.get(grant.tenant)
            if account is not None and account.requests is not None:
                bucket = account.requests
                bucket.level = min(bucket.size, bucket.fill(now_s) + 1)

    def ended(self, request: RequestId, used_tokens: int, now_s: float) -> None:
        """The request is over, and took so many tokens."""
        self._close(request, used_tokens, now_s)

    def tick(self, now_s: float) -> None:
        """Time has passed: grants whose end was never heard of are over."""
        while self._grants:
            request, grant = next(iter(self._grants.items()))
            if now_s - grant.at_s <= self._grant_s:
                break
            self._close(request, grant.tokens, now_s)
        while len(self._accounts) > self._most:
            tenant, account = next(iter(self._accounts.items()))
            if account.open:
                break
            del self._accounts[tenant]

    # ---- inside

    def _charge(
        self,
        account: _Account,
        tenant: TenantId,
        request: RequestId,
        tokens: int,
        now_s: float,
    ) -> None:
        account.open += 1
        for bucket, amount in ((account.requests, 1), (account.tokens, tokens)):
            if bucket is not None:
                bucket.level = bucket.fill(now_s) - amount
        self._grants[request] = _Grant(tenant, tokens, now_s)
        while len(self._grants) > self._most:
            oldest, grant = next(iter(self._grants.items()))
            self._close(oldest, grant.tokens, now_s)

    def _close(self, request: RequestId, used_tokens: int, now_s: float) -> None:
        grant = self._grants.pop(request, None)
        if grant is None:
            return
        account = self._account(grant.tenant, now_s)
        account.open = max(0, account.open - 1)
        unused = grant.tokens - max(0, used_tokens)
        if account.tokens is not None and unused > 0:
            bucket = account.tokens
            bucket.level = min(bucket.size, bucket.fill(now_s) + unused)

    def _quota(self, tenant: TenantId) -> TenantQuota:
        return self._quotas.get(tenant, self._default)

    def _account(self, tenant: TenantId, now_s: float) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _account(self._quota(tenant), None, None)
            for bucket in (account.requests, account.tokens):
                if bucket is not None:
                    bucket.at_s = now_s
        self._accounts.move_to_end(tenant)
        return account


def _account(
    quota: TenantQuota, requests: _Bucket | None, tokens: _Bucket | None
) -> _Account:
    return _Account(
        quota,
        _bucket(quota.requests_per_min, requests),
        _bucket(quota.tokens_per_min, tokens),
    )


def _bucket(per_min: float | None, before: _Bucket | None) -> _Bucket | None:
    """A minute's worth at most, full at first."""
    if per_min is None:
        return None
    per_s = per_min / _MIN_S
    if before is None:
        return _Bucket(per_min, per_s, per_min, 0.0)
    used = before.size - before.level
    return _Bucket(per_min, per_s, per_min - used, before.at_s)


def _too_many(account: _Account, tenant: TenantId) -> Denied | None:
    limit = account.quota.concurrent_requests
    if limit is None or account.open < limit:
        return None
    reason = f"{tenant} has {account.open} requests open, its limit is {limit}"
    return Denied(reason, _S_TO_MS)


def _dry(
    bucket: _Bucket | None, amount: float, reason: str, now_s: float
) -> Denied | None:
    if bucket is None:
        return None
    level = bucket.fill(now_s)
    if level >= amount:
        return None
    limit = f"{reason}: {max(0.0, level):.0f} of {bucket.size:.0f} are left"
    if amount > bucket.size or bucket.per_s <= 0:
        return Denied(f"{limit}, this request needs {amount:.0f}", None)
    wait_ms = (amount - level) / bucket.per_s * _S_TO_MS
    return Denied(limit, max(_LEAST_RETRY_MS, wait_ms))
