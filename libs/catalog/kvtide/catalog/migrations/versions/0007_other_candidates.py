"""What a decision's candidates that aren't listed were predicted to take.

A migration never imports ``tables``: it must go on doing what it did when it was new.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a column; what is there has nothing in it."""
    op.add_column("decisions", sa.Column("others", sa.Text))
