"""Single blocks that people removed, so that a store that was down learns of it too.

A migration never imports ``tables``: it must go on doing what it did when it was new.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a table; what is there stays."""
    op.create_table(
        "removed_blocks",
        sa.Column("key", sa.LargeBinary(16), nullable=False),
        sa.Column("until_s", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_removed_blocks"),
    )
    op.create_index("ix_removed_blocks_until_s", "removed_blocks", ["until_s"])
