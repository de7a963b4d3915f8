"""What gateways have written down of requests that ended, in the site's database."""

import asyncio
from collections.abc import Sequence
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from tests.chaos.site import ChaosSite


def asked_of_database(site: ChaosSite, words: str, **values: Any) -> Sequence[Any]:
    """The rows that a query brings, over no link of ours."""

    folder = str(site.postgres.folder)
    name = site.cluster.catalog.rpartition("/")[2]

    async def ask() -> Sequence[Any]:
        engine = create_async_engine(
            f"postgresql+asyncpg://postgres@/{name}?host={folder}"
        )
        try:
            async with engine.connect() as there:
                return (await there.execute(text(words), values)).all()
        finally:
            await engine.dispose()

    return asyncio.run(ask())


def rows(site: ChaosSite) -> int:
    """Requests that the catalog has."""
    ((count,),) = asked_of_database(site, "SELECT count(*) FROM requests")
    return int(count)


def outcomes(site: ChaosSite, name: str) -> list[str]:
    """How the answers ended of the request that its client called ``name``."""
    words = "SELECT outcome FROM requests WHERE request LIKE :name"
    found = asked_of_database(site, words, name=f"{name}.%")
    return [str(outcome) for (outcome,) in found]
