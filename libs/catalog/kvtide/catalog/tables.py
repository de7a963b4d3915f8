"""The catalog's tables, as the newest migration leaves them.

A contract test compares these with what the migrations make, on both databases.
"""

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
    }
)

NAME = String(128)

nodes = Table(
    "nodes",
    metadata,
    Column("node", NAME, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("roles", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("state", NAME, nullable=False),
    Column("http", Text, nullable=False),
    Column("seen_at_s", Double, nullable=False),
    Column("gone_at_s", Double),
)

blocks = Table(
    "blocks",
    metadata,
    Column("node", NAME, primary_key=True),
    Column("key", LargeBinary(16), primary_key=True),
    Column("tier", NAME, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("key_id", BigInteger, nullable=False),
    Column("model_tag", LargeBinary(16), nullable=False),
    Column("layout_tag", LargeBinary(16), nullable=False),
    Column("tenant_tag", LargeBinary(16), nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("arena", Integer, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("header_xxh3", BigInteger, nullable=False),
    Column("stored_at_s", Double, nullable=False),
    Column("used_at_s", Double, nullable=False),
    Column("hits", BigInteger, nullable=False),
    Index("ix_blocks_key", "key"),
    Index("ix_blocks_model_tag", "model_tag"),
    Index("ix_blocks_tenant_tag", "tenant_tag"),
)

removals = Table(
    "removals",
    metadata,
    Column("node", NAME, primary_key=True),
    Column("key", LargeBinary(16), primary_key=True),
    Column("tier", NAME, primary_key=True),
    Column("generation", BigInteger, primary_key=True),
    Column("reason", NAME, nullable=False),
    Column("model_tag", LargeBinary(16), nullable=False),
    Column("tenant_tag", LargeBinary(16), nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("stored_at_s", Double, nullable=False),
    Column("hits", BigInteger, nullable=False),
    Column("gone_at_s", Double, nullable=False),
    Index("ix_removals_gone_at_s", "gone_at_s"),
)

decisions = Table(
    "decisions",
    metadata,
    Column("request", NAME, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("conductor", NAME, nullable=False),
    Column("tenant", NAME, nullable=False),
    Column("model", Text, nullable=False),
    Column("verdict", NAME, nullable=False),
    Column("code", NAME, nullable=False),
    Column("reason", Text, nullable=False),
    Column("prefill", NAME),
    Column("decode", NAME),
    Column("prompt_tokens", Integer, nullable=False),
    Column("hit_tokens", Integer, nullable=False),
    Column("considered", Integer, nullable=False),
    Column("candidates", Text, nullable=False),
    Column("decided_at_s", Double, nullable=False),
    Column("outcome", NAME),
    Column("outcome_cached_tokens", Integer),
    Column("outcome_ttft_ms", Double),
    Column("outcome_tbt_ms", Double),
    Column("dram_tokens", Integer, nullable=False, server_default="0"),
    Column("ssd_tokens", Integer, nullable=False, server_default="0"),
    Column("others", Text),
    Index("ix_decisions_decided_at_s", "decided_at_s"),
)

requests = Table(
    "requests",
    metadata,
    Column("request", NAME, primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("gateway", NAME, nullable=False),
    Column("tenant", NAME, nullable=False),
    Column("model", Text, nullable=False),
    Column("outcome", NAME, nullable=False),
    Column("code", NAME, nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("cached_tokens", Integer, nullable=False),
    Column("output_tokens", Integer, nullable=False),
    Column("ttft_ms", Double),
    Column("tbt_ms", Double),
    Column("total_ms", Double, nullable=False),
    Column("ended_at_s", Double, nullable=False),
    Index("ix_requests_ended_at_s", "ended_at_s"),
)

tenants = Table(
    "tenants",
    metadata,
    Column("tenant", NAME, primary_key=True),
    Column("name", Text, nullable=False),
    Column("created_at_s", Double, nullable=False),
    Column("deleted_at_s", Double),
    Column("share", NAME, nullable=False, server_default=""),
)

deletions = Table(
    "deletions",
    metadata,
    # an empty tag means any
    Column("tenant_tag", LargeBinary(16), primary_key=True),
    Column("model_tag", LargeBinary(16), primary_key=True),
    Column("until_s", Double, nullable=False),
)

removed_blocks = Table(
    "removed_blocks",
    metadata,
    Column("key", LargeBinary(16), primary_key=True),
    Column("until_s", Double, nullable=False),
    Index("ix_removed_blocks_until_s", "until_s"),
)

tenant_keys = Table(
    "tenant_keys",
    metadata,
    Column("tenant_tag", LargeBinary(16), primary_key=True),
    Column("key_id", LargeBinary(16), nullable=False),
    Column("kek_id", NAME, nullable=False),
    # nothing once it is destroyed
    Column("wrapped", LargeBinary, nullable=False),
    Column("made_at_s", Double, nullable=False),
    Column("destroyed_at_s", Double),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("key_hash", LargeBinary(32), primary_key=True),
    Column("tenant", NAME, ForeignKey("tenants.tenant"), nullable=False, index=True),
    Column("label", Text, nullable=False),
    Column("created_at_s", Double, nullable=False),
    Column("expires_at_s", Double),
    Column("revoked_at_s", Double),
    Column("prefix", NAME, nullable=False, server_default=""),
    Column("scope", NAME, nullable=False, server_default="client"),
)

access = Table(
    "access",
    metadata,
    # one row: ``revision`` grows with each change of a tenant, a key or a quota
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("revision", BigInteger, nullable=False),
    Column("keys_made", BigInteger, nullable=False),
)

audit = Table(
    "audit",
    metadata,
    Column("entry", NAME, primary_key=True),
    Column("at_s", Double, nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", NAME, nullable=False),
    Column("target", Text, nullable=False),
    Column("outcome", NAME, nullable=False),
    Column("detail", Text, nullable=False),
    Index("ix_audit_at_s", "at_s"),
)

quotas = Table(
    "quotas",
    metadata,
    Column("tenant", NAME, ForeignKey("tenants.tenant"), primary_key=True),
    Column("requests_per_min", BigInteger),
    Column("tokens_per_min", BigInteger),
    Column("concurrent_requests", BigInteger),
    Column("pool_bytes", BigInteger),
)
