"""Alembic's entry: runs the migrations on the connection that ``migrate`` opened.

The caller's transaction covers all revisions, so a failed migration leaves nothing.
"""

from alembic import context
from sqlalchemy import Connection

from kvtide.catalog.tables import metadata

_connection: Connection | None = context.config.attributes.get("connection")
if _connection is None:
    raise RuntimeError("run migrations with kvtide.catalog.migrate, not with alembic")
context.configure(
    connection=_connection,
    target_metadata=metadata,
    transactional_ddl=True,
    transaction_per_migration=False,
)
with context.begin_transaction():
    context.run_migrations()
