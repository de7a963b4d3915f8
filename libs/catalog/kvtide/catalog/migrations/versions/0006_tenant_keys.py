"""What tenants' blocks are encrypted with on SSDs, wrapped; emptied to destroy it.

A migration never imports ``tables``: it must go on doing what it did when it was new.
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a table; what is there stays."""
    op.create_table(
        "tenant_keys",
        sa.Column("tenant_tag", sa.LargeBinary(16), nullable=False),
        sa.Column("key_id", sa.LargeBinary(16), nullable=False),
        sa.Column("kek_id", sa.String(128), nullable=False),
        sa.Column("wrapped", sa.LargeBinary, nullable=False),
        sa.Column("made_at_s", sa.Double, nullable=False),
        sa.Column("destroyed_at_s", sa.Double),
        sa.PrimaryKeyConstraint("tenant_tag", name="pk_tenant_keys"),
    )
