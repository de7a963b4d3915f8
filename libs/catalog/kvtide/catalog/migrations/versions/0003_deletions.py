"""What people removed, so that a store that was down learns of it when it starts.

A migration never imports ``tables``: it must go on doing what it did when it was new.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a table; what is there stays."""
    op.create_table(
        "deletions",
        sa.Column("tenant_tag", sa.LargeBinary(16), nullable=False),
        sa.Column("model_tag", sa.LargeBinary(16), nullable=False),
        sa.Column("until_s", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("tenant_tag", "model_tag", name="pk_deletions"),
    )
