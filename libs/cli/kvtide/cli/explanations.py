"""Where the decision on a request is found: at a conductor, else in the catalog."""

import asyncio

import msgspec

from kvtide.bus.messages import (
    CandidateEstimate,
    Explained,
    ExplainQuery,
    OtherCandidates,
)
from kvtide.catalog import (
    Catalog,
    CatalogError,
    DecisionOutcome,
    DecisionRow,
    catalog_url,
    is_missing,
)
from kvtide.cli.access import NoConductorError, NoNatsError, ask_conductors, open_bus
from kvtide.kv import RequestId
from kvtide.runtime import KvtideError
from kvtide.runtime.settings import RoleSettings, hide_passwords

CATALOG_LIMIT_S = 10.0

_REPLY_PREFIXES = ("chatcmpl-", "cmpl-")
"""What the ``id`` in a reply has before the request's name."""


class UnknownRequestError(KvtideError):
    """Nobody knows of a decision on the request."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The newest decision on a request, and what came of it if that is known.

    ``considered`` counts all candidates; ``others`` sums up those that aren't listed.
    ``source`` is the conductor that remembers it, or ``catalog``.
    """

    request: RequestId
    attempt: int
    reason: str
    candidates: tuple[CandidateEstimate, ...]
    source: str
    outcome: DecisionOutcome | None = None
    considered: int = 0
    others: OtherCandidates | None = None


async def find_explanation(settings: RoleSettings, asked: str) -> Explanation:
    """What is known of the request named ``asked``, or called so by its client.

    All live conductors are asked; if none remembers it, the catalog is read.

    Raises:
        UnknownRequestError: neither knows it; the message says what each said.
        ConfigError: the secret, an address or the catalog's URL can't be used.
    """
    for prefix in _REPLY_PREFIXES:
        asked = asked.removeprefix(prefix)
    try:
        remembered = await _remembered(settings, RequestId(asked))
        missing = "no live conductor remembers it"
    except (NoConductorError, NoNatsError) as error:
        remembered, missing = None, str(error)
    if remembered is not None:
        return remembered
    try:
        async with asyncio.timeout(CATALOG_LIMIT_S):
            recorded = await _recorded(settings, asked)
    except (CatalogError, TimeoutError) as error:
        why = str(error) or "the catalog does not answer"
        raise _unknown(asked, missing, hide_passwords(why)) from error
    if recorded is None:
        raise _unknown(asked, missing, "the catalog has no decision on it")
    return recorded


def _unknown(asked: str, conductors: str, catalog: str) -> UnknownRequestError:
    return UnknownRequestError(
        f"nothing is known of request {asked!r}: {conductors}; {catalog}"
    )


async def _remembered(settings: RoleSettings, request: RequestId) -> Explanation | None:
    async with open_bus(settings) as bus:
        answers = await ask_conductors(bus, ExplainQuery(request=request))
    found = [
        Explanation(
            request=answer.request,
            attempt=answer.attempt,
            reason=answer.reason,
            candidates=answer.candidates,
            source=node,
            outcome=_of_actual(answer),
            considered=answer.considered,
            others=answer.others,
        )
        for node, answer in answers.items()
        if isinstance(answer, Explained)
    ]
    # after a fail-over to another conductor the last attempt is that one's
    return max(found, key=lambda each: each.attempt, default=None)


async def _recorded(settings: RoleSettings, asked: str) -> Explanation | None:
    url = catalog_url(settings.catalog, settings.state_dir)
    if is_missing(url):
        return None
    async with Catalog.open(url) as catalog:
        request = await catalog.find_request(asked)
        decisions = await catalog.decisions(request) if request is not None else ()
    return _of_row(decisions[-1]) if decisions else None


def _of_actual(answer: Explained) -> DecisionOutcome | None:
    """What the conductor heard of the request's end."""
    actual = answer.actual
    if actual is None:
        return None
    return DecisionOutcome(
        request=answer.request,
        attempt=answer.attempt,
        outcome=actual.outcome,
        cached_tokens=actual.cached_tokens,
        ttft_ms=actual.ttft_ms,
        tbt_ms=actual.tbt_ms,
    )


def _of_row(row: DecisionRow) -> Explanation:
    return Explanation(
        request=row.request,
        attempt=row.attempt,
        reason=row.reason,
        candidates=msgspec.convert(
            row.candidates, tuple[CandidateEstimate, ...], from_attributes=True
        ),
        source="catalog",
        outcome=row.outcome,
        considered=row.considered,
        others=msgspec.convert(
            row.others, OtherCandidates | None, from_attributes=True
        ),
    )
