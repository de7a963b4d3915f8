"""What tenants may use: requests and tokens a minute, requests at once.

A tenant's home conductor grants (see ``homes``). Grants are idempotent by request and
expire; those of placements that another conductor made are charged here too, so that
whoever takes over as home knows what was used. Tokens that were granted and not used
are given back.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtide.bus.messages import HeldGrant, TenantUse
from kvtide.conductor.quota import NO_QUOTA, TenantQuota
from kvtide.kv import NodeId, RequestId, TenantId

_MIN_S = 60.0
_S_TO_MS = 1000.0
_LEAST_RETRY_MS = 100.0
_ASSUMED_S = 2.0
_NEWEST = 0.2
"""How much of a mean the newest value is."""


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
    held: set[RequestId] = field(default_factory=set[RequestId])
    adopted: bool = False
    held_s: float = _ASSUMED_S
    """For how long requests of late held their grant."""


@dataclass(frozen=True, slots=True)
class _Grant:
    tenant: TenantId
    tokens: int
    at_s: float


@dataclass(frozen=True, slots=True)
class _Early:
    """The end of a request whose placement was not heard yet, and what it took."""

    used_tokens: int
    at_s: float


class TenantLimits:
    """Token buckets and open requests by tenant. Bounded in number and age.

    An account is ``adopted`` once it has what was used before this process knew of it.
    """

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
        self._lent: OrderedDict[RequestId, float] = OrderedDict()
        self._early: OrderedDict[RequestId, _Early] = OrderedDict()

    def __len__(self) -> int:
        """Requests that hold a grant."""
        return len(self._grants)

    def open_requests(self, tenant: TenantId) -> int:
        """Requests of a tenant that hold a grant."""
        account = self._accounts.get(tenant)
        return len(account.held) if account is not None else 0

    def replace(self, quotas: Mapping[TenantId, TenantQuota]) -> None:
        """Quotas have changed; what was used of the old ones stays used."""
        if quotas == self._quotas:
            return
        self._quotas = dict(quotas)
        for tenant, account in list(self._accounts.items()):
            quota = self._quota(tenant)
            if quota != account.quota:
                renewed = _account(quota, account.requests, account.tokens)
                renewed.held, renewed.adopted = account.held, account.adopted
                renewed.held_s = account.held_s
                self._accounts[tenant] = renewed

    def is_limited(self, tenant: TenantId) -> bool:
        """Whether anything is set for this tenant."""
        return self._quota(tenant) != NO_QUOTA

    def holds(self, request: RequestId) -> bool:
        """Whether this request holds a grant."""
        return request in self._grants

    def is_adopted(self, tenant: TenantId) -> bool:
        """Whether what this tenant used is known completely."""
        account = self._accounts.get(tenant)
        return account is not None and account.adopted

    def adopt(self, tenant: TenantId, now_s: float) -> None:
        """Nobody knows more of this tenant than this conductor does."""
        self._account(tenant, now_s).adopted = True

    def learn(self, tenant: TenantId, use: TenantUse, now_s: float) -> None:
        """Take over what another conductor knows.

        What was charged here and isn't in ``use`` stays charged.
        """
        account = self._account(tenant, now_s)
        theirs = {held.request for held in use.grants}
        own = [self._grants[request] for request in account.held - theirs]
        for bucket, used in (
            (account.requests, use.requests + len(own)),
            (account.tokens, use.tokens + sum(grant.tokens for grant in own)),
        ):
            if bucket is not None:
                bucket.level = min(bucket.fill(now_s), bucket.size - max(0.0, used))
        for held in use.grants:
            if held.request not in self._grants:
                at_s = now_s - max(0.0, held.age_ms) / _S_TO_MS
                self._hold(account, tenant, held.request, held.tokens, at_s)

    def use(self, tenant: TenantId, me: NodeId, now_s: float) -> TenantUse:
        """What this tenant has used, for whoever takes over as its home."""
        account = self._account(tenant, now_s)
        requests, tokens = (
            bucket.size - bucket.fill(now_s) if bucket is not None else 0.0
            for bucket in (account.requests, account.tokens)
        )
        grants = tuple(
            HeldGrant(request, grant.tokens, (now_s - grant.at_s) * _S_TO_MS)
            for request, grant in self._held(account)
        )
        return TenantUse(
            tenant=tenant,
            requests=requests,
            tokens=tokens,
            grants=grants,
            conductor=me,
            whole=account.adopted,
        )

    def forsake(self) -> None:
        """This process was paused: others know more of all tenants by now."""
        for account in self._accounts.values():
            account.adopted = False

    def lend(
        self,
        tenant: TenantId,
        request: RequestId,
        tokens: int,
        until_s: float,
        now_s: float,
    ) -> Denied | None:
        """As ``grant``, but all is given back at ``until_s`` if nothing comes of it."""
        held = request in self._grants
        denied = self.grant(tenant, request, tokens, now_s)
        if denied is None and not held:
            self._lent[request] = until_s
        return denied

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
        """Another conductor placed this: what was lent for it is granted."""
        self._lent.pop(request, None)
        if request not in self._grants:
            account = self._account(tenant, now_s)
            self._charge(account, tenant, request, tokens, now_s)

    def heard_late(self, tenant: TenantId, request: RequestId, now_s: float) -> None:
        """Another conductor placed this, and its end came before that word of it.

        What it took is charged, once; a request whose end found its grant was charged.
        """
        early = self._early.pop(request, None)
        if early is not None:
            account = self._account(tenant, now_s)
            _spend(account, early.used_tokens, now_s)

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
        if request not in self._grants:
            self._early[request] = _Early(max(0, used_tokens), now_s)
            while len(self._early) > self._most:
                self._early.popitem(last=False)
        self._close(request, used_tokens, now_s)

    def lost(self, request: RequestId, now_s: float) -> None:
        """The request is over, and nobody knows what it took: all that was granted."""
        grant = self._grants.get(request)
        if grant is not None:
            self._close(request, grant.tokens, now_s)

    def tick(self, now_s: float) -> None:
        """Time has passed: grants whose end was never heard of are over."""
        while self._lent:
            request, until_s = next(iter(self._lent.items()))
            if now_s < until_s:
                break
            self.release(request, now_s)
            self._lent.pop(request, None)
        while self._grants:
            request, grant = next(iter(self._grants.items()))
            if now_s - grant.at_s <= self._grant_s:
                break
            self._close(request, grant.tokens, now_s)
        while self._early:
            request, early = next(iter(self._early.items()))
            if now_s - early.at_s <= _MIN_S:
                break
            del self._early[request]
        while len(self._accounts) > self._most:
            tenant, account = next(iter(self._accounts.items()))
            if account.held:
                break
            del self._accounts[tenant]

    # ---- inside

    def _held(self, account: _Account) -> list[tuple[RequestId, _Grant]]:
        """The grants of an account that are not lent, the oldest first."""
        held = [(name, self._grants[name]) for name in account.held - self._lent.keys()]
        return sorted(held, key=lambda each: each[1].at_s)

    def _charge(
        self,
        account: _Account,
        tenant: TenantId,
        request: RequestId,
        tokens: int,
        now_s: float,
    ) -> None:
        _spend(account, tokens, now_s)
        self._hold(account, tenant, request, tokens, now_s)

    def _hold(
        self,
        account: _Account,
        tenant: TenantId,
        request: RequestId,
        tokens: int,
        now_s: float,
    ) -> None:
        account.held.add(request)
        self._grants[request] = _Grant(tenant, tokens, now_s)
        while len(self._grants) > self._most:
            oldest, grant = next(iter(self._grants.items()))
            self._close(oldest, grant.tokens, now_s)

    def _close(self, request: RequestId, used_tokens: int, now_s: float) -> None:
        grant = self._grants.pop(request, None)
        self._lent.pop(request, None)
        if grant is None:
            return
        account = self._account(grant.tenant, now_s)
        account.held.discard(request)
        account.held_s += (now_s - grant.at_s - account.held_s) * _NEWEST
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


def _spend(account: _Account, tokens: int, now_s: float) -> None:
    """Take one request and its tokens off what is left; it may become a debt."""
    for bucket, amount in ((account.requests, 1), (account.tokens, tokens)):
        if bucket is not None:
            bucket.level = bucket.fill(now_s) - amount


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
    count = len(account.held)
    if limit is None or count < limit:
        return None
    reason = f"{tenant} has {count} requests open, its limit is {limit}"
    # of so many that take that long each, the next one ends about then
    wait_ms = account.held_s / max(1, count) * _S_TO_MS
    return Denied(reason, max(_LEAST_RETRY_MS, wait_ms))


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
