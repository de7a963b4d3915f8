"""Which conductor is a tenant's home, and which comes next. Pure."""

from collections.abc import Iterable

from xxhash import xxh3_64_intdigest

from kvtide.kv.ids import NodeRef, TenantId


def rendezvous_order(tenant: TenantId, conductors: Iterable[NodeRef]) -> list[NodeRef]:
    """All conductors, the tenant's home first.

    Highest random weight: when one joins or leaves, only its own tenants move. Equal
    for all who see the same conductors; a restart changes nothing.
    """

    def weight(conductor: NodeRef) -> tuple[int, NodeRef]:
        return xxh3_64_intdigest(f"{tenant}\0{conductor.node}".encode()), conductor

    return sorted(conductors, key=weight, reverse=True)
