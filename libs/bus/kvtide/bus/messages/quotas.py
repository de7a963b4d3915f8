"""Conductor → conductor: may this request use its tenant's quota?

A tenant's home is the first live conductor in the tenant's rendezvous order; it alone
grants. ``GrantAsked`` → ``Granted`` or ``GrantDenied``. A conductor that becomes a
tenant's home asks the next one what was used so far, and if that one was not the home in
its life, the one that has lived longest too: ``UseQuery`` → ``TenantUse``.
"""

import msgspec

from kvtide.bus.messages.base import Message
from kvtide.kv import NodeId, RequestId, TenantId


class GrantAsked(Message, frozen=True, tag="grant_asked"):
    """→ the tenant's home. Idempotent by request.

    What is granted is a lease of a few seconds until the request's placement is heard.
    """

    request: RequestId
    tenant: TenantId
    tokens: int


class Granted(Message, frozen=True, tag="granted"):
    """The request may be placed; prompt and longest answer are charged."""

    request: RequestId


class GrantDenied(Message, frozen=True, tag="grant_denied"):
    """Nothing was charged. ``retry_after_ms`` None: trying again is pointless."""

    request: RequestId
    reason: str
    retry_after_ms: float | None = None


class UseQuery(Message, frozen=True, tag="use_query"):
    """→ ``TenantUse``."""

    tenant: TenantId


class HeldGrant(msgspec.Struct, frozen=True, array_like=True):
    """A request that holds a grant."""

    request: RequestId
    tokens: int
    age_ms: float


class TenantUse(Message, frozen=True, tag="tenant_use"):
    """What a tenant has used, as one conductor knows it.

    ``requests`` and ``tokens`` are what is missing from a full minute's worth now, 0
    without a limit; those of ``grants`` are included. ``whole``: ``conductor`` was the
    tenant's home in its life, so it knows what was used before it, too.
    """

    tenant: TenantId
    requests: float
    tokens: float
    grants: tuple[HeldGrant, ...] = ()
    conductor: NodeId = NodeId("")
    whole: bool = False
