"""The catalog's schema as a chain of Alembic revisions."""
