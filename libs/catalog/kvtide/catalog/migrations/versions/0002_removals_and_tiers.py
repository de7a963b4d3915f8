"""Why blocks went, and from which tier a request's prefix was to come.

A migration never imports ``tables``: it must go on doing what it did when it was new.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_NAME = sa.String(128)


def upgrade() -> None:
    """Add a table, two columns and two indexes; what is there stays."""
    op.create_table(
        "removals",
        sa.Column("node", _NAME, nullable=False),
        sa.Column("key", sa.LargeBinary(16), nullable=False),
        sa.Column("tier", _NAME, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("reason", _NAME, nullable=False),
        sa.Column("model_tag", sa.LargeBinary(16), nullable=False),
        sa.Column("tenant_tag", sa.LargeBinary(16), nullable=False),
        sa.Column("tokens", sa.Integer, nullable=False),
        sa.Column("length", sa.BigInteger, nullable=False),
        sa.Column("stored_at_s", sa.Double, nullable=False),
        sa.Column("hits", sa.BigInteger, nullable=False),
        sa.Column("gone_at_s", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint(
            "node", "key", "tier", "generation", name="pk_removals"
        ),
    )
    op.create_index("ix_removals_gone_at_s", "removals", ["gone_at_s"])
    op.create_index("ix_blocks_key", "blocks", ["key"])
    for tier in ("dram", "ssd"):
        column = sa.Column(
            f"{tier}_tokens", sa.Integer, nullable=False, server_default="0"
        )
        op.add_column("decisions", column)
