"""Keys by their public beginning and scope, shared caches, and a book of what was done.

A migration never imports ``tables``: it must go on doing what it did when it was new.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_NAME = sa.String(128)


def upgrade() -> None:
    """Add three columns and two tables; what is there stays."""
    op.add_column(
        "api_keys", sa.Column("prefix", _NAME, nullable=False, server_default="")
    )
    op.add_column(
        "api_keys", sa.Column("scope", _NAME, nullable=False, server_default="client")
    )
    op.add_column(
        "tenants", sa.Column("share", _NAME, nullable=False, server_default="")
    )
    op.create_table(
        "access",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("keys_made", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_access"),
    )
    op.execute(
        "INSERT INTO access (id, revision, keys_made) "
        "SELECT 1, 1, count(*) FROM api_keys"
    )
    op.create_table(
        "audit",
        sa.Column("entry", _NAME, nullable=False),
        sa.Column("at_s", sa.Double, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("action", _NAME, nullable=False),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("outcome", _NAME, nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("entry", name="pk_audit"),
    )
    op.create_index("ix_audit_at_s", "audit", ["at_s"])
