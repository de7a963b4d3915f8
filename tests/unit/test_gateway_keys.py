"""Whether a key opens the door, and what of it is kept and shown."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from prometheus_client import CollectorRegistry

from kvtide.catalog import (
    Access,
    ApiKeyRow,
    AuditRow,
    CatalogUnavailableError,
    Change,
    KeyScope,
    TenantRow,
    Writer,
    check_tenant_name,
    key_hash,
    key_prefix,
    make_key,
)
from kvtide.gateway.access.audit import AuditBook
from kvtide.gateway.access.auth_mode import AuthMode
from kvtide.gateway.access.caller import Caller
from kvtide.gateway.access.key_follower import KeyFollower
from kvtide.gateway.access.keyring import Keyring, KeyRules, Refused, judge
from kvtide.kv import TenantId
from kvtide.runtime import ConfigError, ManualClock

ACME, OPERATORS = TenantId("acme"), TenantId("_operators")
KEY, ADMIN = make_key(), make_key()
ROW = ApiKeyRow(KEY.key_hash, ACME, "laptop", 1.0, prefix=KEY.prefix)
ADMIN_ROW = ApiKeyRow(
    ADMIN.key_hash, OPERATORS, "", 1.0, prefix=ADMIN.prefix, scope=KeyScope.ADMIN
)
TENANT = TenantRow(ACME, "Acme", 1.0)
ACCESS = Access(revision=3, keys_made=2, tenants=(TENANT,), keys=(ROW, ADMIN_ROW))
RULES = KeyRules(max_age_s=100.0, fresh_s=10.0)
RING = Keyring(ACCESS)


def test_a_key_is_named_by_its_prefix_and_kept_as_a_hash() -> None:
    assert KEY.text.startswith(f"kvt_{KEY.prefix}_")
    assert key_prefix(KEY.text) == KEY.prefix
    assert key_hash(KEY.text) == KEY.key_hash
    secret = KEY.text.removeprefix(f"kvt_{KEY.prefix}_")
    assert len(secret) > 30
    assert secret not in repr(KEY)
    assert secret not in repr(ROW)
    assert make_key().text != KEY.text


@given(st.text(max_size=80))
def test_what_is_no_key_has_no_prefix_and_opens_nothing(text: str) -> None:
    assert key_prefix(text) is None
    assert RING.find(text, 2.0) is Refused.UNKNOWN


@pytest.mark.parametrize(
    "name", ["", "a b", "../x", "shared:x", "_operators", "x" * 65]
)
def test_names_that_no_tenant_may_have(name: str) -> None:
    with pytest.raises(ConfigError, match="a name has"):
        check_tenant_name(name)


def test_a_key_stands_for_its_tenant_until_it_ends() -> None:
    assert RING.find(KEY.text, 2.0) == Caller(ACME, key=KEY.prefix)
    assert RING.find(ADMIN.text, 2.0) == Caller(OPERATORS, key=ADMIN.prefix, admin=True)
    # the right prefix with another secret is as unknown as any
    assert RING.find(KEY.text[:-1] + "\u00e9", 2.0) is Refused.UNKNOWN
    other = f"kvt_{KEY.prefix}_{make_key().text.split('_', 2)[2]}"
    assert RING.find(other, 2.0) is Refused.UNKNOWN

    def ring(row: ApiKeyRow, tenant: TenantRow = TENANT) -> Keyring:
        return Keyring(replace(ACCESS, keys=(row,), tenants=(tenant,)))

    assert ring(replace(ROW, revoked_at_s=1.5)).find(KEY.text, 2.0) is Refused.REVOKED
    expiring = ring(replace(ROW, expires_at_s=5.0))
    assert expiring.find(KEY.text, 4.9) == Caller(ACME, key=KEY.prefix)
    assert expiring.find(KEY.text, 5.0) is Refused.EXPIRED
    gone = ring(ROW, replace(TENANT, deleted_at_s=1.0))
    assert gone.find(KEY.text, 2.0) is Refused.TENANT_GONE


def test_tenants_that_share_a_cache_have_one_owner_of_blocks() -> None:
    ring = Keyring(replace(ACCESS, tenants=(replace(TENANT, share="team"),)))
    found = ring.find(KEY.text, 2.0)
    assert isinstance(found, Caller)
    assert found.tenant == ACME
    assert found.cache_owner == "shared:team"
    assert Caller(ACME).cache_owner == ACME


def test_without_any_key_ever_made_everybody_is_the_default_tenant() -> None:
    empty = Keyring(Access())
    assert judge(RULES, empty, 1e9, None, 2.0) == RULES.default
    assert judge(RULES, empty, 0.0, "EMPTY", 2.0) == RULES.default
    required = replace(RULES, mode=AuthMode.REQUIRED)
    assert judge(required, empty, 0.0, None, 2.0) is Refused.MISSING
    # revoked keys stay counted: nothing opens by revoking the last one
    revoked = replace(ACCESS, keys=(replace(ROW, revoked_at_s=1.0),))
    assert judge(RULES, Keyring(revoked), 0.0, None, 2.0) is Refused.MISSING
    pruned = replace(ACCESS, keys=())
    assert judge(RULES, Keyring(pruned), 0.0, None, 2.0) is Refused.MISSING


def test_known_keys_go_on_for_a_bounded_time_and_unknown_ones_are_unchecked() -> None:
    caller = Caller(ACME, key=KEY.prefix)
    stranger = make_key().text
    assert judge(RULES, RING, 99.0, KEY.text, 2.0) == caller
    assert judge(RULES, RING, 9.0, stranger, 2.0) is Refused.UNKNOWN
    assert judge(RULES, RING, 11.0, stranger, 2.0) is Refused.UNCHECKED
    assert judge(RULES, RING, 101.0, KEY.text, 2.0) is Refused.UNCHECKED
    assert judge(RULES, None, 0.0, KEY.text, 2.0) is Refused.UNCHECKED
    is_open = replace(RULES, mode=AuthMode.OPEN)
    assert judge(is_open, None, 0.0, None, 2.0) == RULES.default
    assert judge(is_open, RING, 0.0, stranger, 2.0) == RULES.default
    assert judge(is_open, RING, 0.0, KEY.text, 2.0) == caller


class Source:
    """A catalog that a test changes, breaks and counts."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.down = False
        self.reads = 0

    async def read(self, known_revision: int | None) -> Access | None:
        self.reads += 1
        if self.down:
            raise CatalogUnavailableError("down")
        if known_revision == self.access.revision:
            return None
        return self.access


def follower(source: Source, clock: ManualClock) -> KeyFollower:
    return KeyFollower(
        source, RULES, clock=clock, registry=CollectorRegistry(), refresh_s=2.0
    )


async def test_a_key_made_a_moment_ago_works_at_once_and_a_guess_is_read_for_seldom() -> (
    None
):
    clock = ManualClock()
    source = Source(replace(ACCESS, keys=()))
    keys = follower(source, clock)
    await keys.start()
    source.access = replace(ACCESS, revision=4)
    await clock.advance(1.0)
    assert await keys.check(KEY.text) == Caller(ACME, key=KEY.prefix)
    reads = source.reads
    guesses = [make_key().text for _ in range(20)]
    found = await asyncio.gather(*(keys.check(guess) for guess in guesses))
    assert set(found) == {Refused.UNKNOWN}
    assert source.reads <= reads + 1


async def test_a_catalog_that_is_down_ends_known_keys_at_their_age() -> None:
    clock = ManualClock()
    source = Source(ACCESS)
    keys = follower(source, clock)
    await keys.start()
    source.down = True
    await clock.advance(90.0)
    assert await keys.check(KEY.text) == Caller(ACME, key=KEY.prefix)
    assert await keys.check(make_key().text) is Refused.UNCHECKED
    await clock.advance(20.0)
    assert await keys.check(KEY.text) is Refused.UNCHECKED
    source.down = False
    await clock.advance(1.0)
    assert await keys.check(KEY.text) == Caller(ACME, key=KEY.prefix)


class Sink:
    """What was written."""

    def __init__(self) -> None:
        self.rows: list[Change] = []

    async def migrate(self) -> None:
        """There is nothing to migrate."""

    async def write(self, changes: Sequence[Change]) -> None:
        self.rows += changes


async def test_a_flood_of_bad_keys_is_a_few_entries() -> None:
    clock = ManualClock()
    writer = Writer(Sink(), clock=clock)
    book = AuditBook(writer, clock)
    for _ in range(1000):
        book.key_failed(KEY.prefix, Refused.REVOKED, "10.0.0.1")
    assert writer.backlog == 1
    await clock.advance(61.0)
    book.key_failed(KEY.prefix, Refused.REVOKED, "10.0.0.1")
    assert writer.backlog == 2
    for _ in range(5000):
        book.key_failed(make_key().prefix, Refused.UNKNOWN, "10.0.0.2")
    assert writer.backlog <= 1100
    assert AuditRow.__dataclass_fields__.keys() >= {"actor", "action", "outcome"}
