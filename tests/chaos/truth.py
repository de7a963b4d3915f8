"""What conductors believe to be in the pool, held against what the stores have."""

import asyncio

from tests.chaos.site import HOSTS, READY_LIMIT_S, ChaosSite
from tests.e2e.system import wait_for

from kvtide.bus.messages import BlockSelector
from kvtide.cli.access import open_bus
from kvtide.cli.stores import NoStoreError, list_blocks
from kvtide.kv import BlockKey, NodeId
from kvtide.runtime.settings import RoleSettings


async def _stored(settings: RoleSettings) -> set[BlockKey]:
    stores = [NodeId(f"store-{number}") for number in range(HOSTS)]
    async with open_bus(settings) as bus:
        listed = list_blocks(bus, stores, BlockSelector())
        return {block.located.key async for _, block in listed}


def stored(site: ChaosSite) -> set[BlockKey]:
    """The keys of all blocks, as the stores themselves list them.

    Raises:
        NoStoreError: one does not answer.
    """
    return asyncio.run(
        _stored(
            RoleSettings(nats=site.cluster.nats.url, state_dir=site.cluster.state_dir)
        )
    )


def indexed(site: ChaosSite) -> list[int]:
    """How many keys each conductor knows; -1: it does not call its index exact."""
    told = [site.cluster[f"conductor-{number}"].metrics() for number in range(HOSTS)]
    return [
        int(each["kvtide_conductor_indexed_blocks"])
        if each["kvtide_conductor_index_exact"] == 1
        else -1
        for each in told
    ]


def are_true(site: ChaosSite) -> bool:
    """Whether each conductor calls its index exact and knows as many keys as there are.

    Nothing may be asked for meanwhile, or the one changes while the other is counted.
    """
    try:
        keys = len(stored(site))
    except NoStoreError:
        return False
    return indexed(site) == [keys] * HOSTS


def _told(site: ChaosSite) -> str:
    try:
        return str(len(stored(site)))
    except NoStoreError as error:
        return str(error)


def wait_true(site: ChaosSite) -> None:
    """Wait until the indexes of all conductors are true."""
    try:
        wait_for(lambda: are_true(site), READY_LIMIT_S, "indexes are true", 0.5)
    except AssertionError as error:
        told = f"they have {indexed(site)} keys, the stores {_told(site)}"
        raise AssertionError(f"{error}; {told}") from error
