"""The first schema: nodes, blocks, requests, decisions, tenants, keys, quotas.

A migration never imports ``tables``: it must go on doing what it did when it was new.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_NAME = sa.String(128)


def upgrade() -> None:
    """Make all tables."""
    _nodes_and_blocks()
    _decisions()
    _requests()
    _tenants()


def _name(column: str, *, null: bool = False) -> sa.Column[str]:
    return sa.Column(column, _NAME, nullable=null)


def _text(column: str) -> sa.Column[str]:
    return sa.Column(column, sa.Text, nullable=False)


def _int(column: str, *, null: bool = False) -> sa.Column[int]:
    return sa.Column(column, sa.Integer, nullable=null)


def _big(column: str, *, null: bool = False) -> sa.Column[int]:
    return sa.Column(column, sa.BigInteger, nullable=null)


def _real(column: str, *, null: bool = False) -> sa.Column[float]:
    return sa.Column(column, sa.Double, nullable=null)


def _bytes(column: str, size: int) -> sa.Column[bytes]:
    return sa.Column(column, sa.LargeBinary(size), nullable=False)


def _nodes_and_blocks() -> None:
    op.create_table(
        "nodes",
        _name("node"),
        _big("epoch"),
        _text("roles"),
        _text("host"),
        _name("state"),
        _text("http"),
        _real("seen_at_s"),
        _real("gone_at_s", null=True),
        sa.PrimaryKeyConstraint("node", name="pk_nodes"),
    )
    op.create_table(
        "blocks",
        _name("node"),
        _bytes("key", 16),
        _name("tier"),
        _big("epoch"),
        _big("key_id"),
        _bytes("model_tag", 16),
        _bytes("layout_tag", 16),
        _bytes("tenant_tag", 16),
        _int("tokens"),
        _int("arena"),
        _big("offset"),
        _big("length"),
        _big("generation"),
        _big("header_xxh3"),
        _real("stored_at_s"),
        _real("used_at_s"),
        _big("hits"),
        sa.PrimaryKeyConstraint("node", "key", "tier", name="pk_blocks"),
    )
    op.create_index("ix_blocks_model_tag", "blocks", ["model_tag"])
    op.create_index("ix_blocks_tenant_tag", "blocks", ["tenant_tag"])


def _decisions() -> None:
    op.create_table(
        "decisions",
        _name("request"),
        _int("attempt"),
        _name("conductor"),
        _name("tenant"),
        _text("model"),
        _name("verdict"),
        _name("code"),
        _text("reason"),
        _name("prefill", null=True),
        _name("decode", null=True),
        _int("prompt_tokens"),
        _int("hit_tokens"),
        _int("considered"),
        _text("candidates"),
        _real("decided_at_s"),
        _name("outcome", null=True),
        _int("outcome_cached_tokens", null=True),
        _real("outcome_ttft_ms", null=True),
        _real("outcome_tbt_ms", null=True),
        sa.PrimaryKeyConstraint("request", "attempt", name="pk_decisions"),
    )
    op.create_index("ix_decisions_decided_at_s", "decisions", ["decided_at_s"])


def _requests() -> None:
    op.create_table(
        "requests",
        _name("request"),
        _int("attempt"),
        _name("gateway"),
        _name("tenant"),
        _text("model"),
        _name("outcome"),
        _name("code"),
        _int("prompt_tokens"),
        _int("cached_tokens"),
        _int("output_tokens"),
        _real("ttft_ms", null=True),
        _real("tbt_ms", null=True),
        _real("total_ms"),
        _real("ended_at_s"),
        sa.PrimaryKeyConstraint("request", name="pk_requests"),
    )
    op.create_index("ix_requests_ended_at_s", "requests", ["ended_at_s"])


def _tenants() -> None:
    op.create_table(
        "tenants",
        _name("tenant"),
        _text("name"),
        _real("created_at_s"),
        _real("deleted_at_s", null=True),
        sa.PrimaryKeyConstraint("tenant", name="pk_tenants"),
    )
    op.create_table(
        "api_keys",
        _bytes("key_hash", 32),
        _name("tenant"),
        _text("label"),
        _real("created_at_s"),
        _real("expires_at_s", null=True),
        _real("revoked_at_s", null=True),
        sa.PrimaryKeyConstraint("key_hash", name="pk_api_keys"),
        sa.ForeignKeyConstraint(
            ["tenant"], ["tenants.tenant"], name="fk_api_keys_tenant"
        ),
    )
    op.create_index("ix_api_keys_tenant", "api_keys", ["tenant"])
    op.create_table(
        "quotas",
        _name("tenant"),
        _big("requests_per_min", null=True),
        _big("tokens_per_min", null=True),
        _big("concurrent_requests", null=True),
        _big("pool_bytes", null=True),
        sa.PrimaryKeyConstraint("tenant", name="pk_quotas"),
        sa.ForeignKeyConstraint(
            ["tenant"], ["tenants.tenant"], name="fk_quotas_tenant"
        ),
    )
