"""A store's settings as the rules of its pure parts."""

from kvtide.kv import TenantId, tenant_tag
from kvtide.store.accounts import ShareRules
from kvtide.store.curation import CurationRules
from kvtide.store.eviction import Policy
from kvtide.store.host import HostRules
from kvtide.store.replicas import ReplicaRules
from kvtide.store.settings import StoreSettings
from kvtide.store.slot_states import TableRules
from kvtide.store.ssd.life import ssd_rules
from kvtide.store.store_rules import StoreRules

MOST_RESERVE_BYTES = 1 << 30
RESERVE_PART = 50


def table_rules(settings: StoreSettings, secret: bytes) -> TableRules:
    """Who shares the arena and who goes; tenants by their tags under ``secret``."""

    def tag(name: str) -> bytes:
        return tenant_tag(secret, TenantId(name))

    shares = ShareRules(
        fair=settings.fair_shares,
        idle_s=settings.share_idle_s,
        weights={tag(name): value for name, value in settings.tenant_weights.items()},
        limits_bytes={
            tag(name): value for name, value in settings.tenant_limit_bytes.items()
        },
    )
    return TableRules(
        policy=Policy(settings.eviction),
        shares=shares,
        hard_pin_share=settings.hard_pin_share,
    )


def tenant_tags(settings: StoreSettings, secret: bytes) -> dict[str, bytes]:
    """The tenants that the settings name, with their tags."""
    names = settings.tenant_weights.keys() | settings.tenant_limit_bytes.keys()
    return {name: tenant_tag(secret, TenantId(name)) for name in sorted(names)}


def curation_rules(settings: StoreSettings) -> CurationRules:
    """What people may ask for at once."""
    return CurationRules(soft_pin_limit_s=settings.soft_pin_limit_s)


def host_rules(settings: StoreSettings, total_bytes: int | None) -> HostRules:
    """What is the host's; a fiftieth of its memory up to 1 GiB if it is not set."""
    reserve = settings.host_reserve_bytes
    if not reserve:
        reserve = min(MOST_RESERVE_BYTES, (total_bytes or 0) // RESERVE_PART)
    return HostRules(
        reserve_bytes=reserve,
        pressure_percent=settings.host_pressure_percent,
        floor_bytes=settings.dram_keep_bytes,
    )


def store_rules(settings: StoreSettings, arena_bytes: int, secret: bytes) -> StoreRules:
    """The limits of a machine over an arena of that size."""
    return StoreRules(
        arena_bytes=arena_bytes,
        slab_bytes=settings.slab_bytes,
        gossip_delay_s=settings.gossip_delay_ms / 1e3,
        silence_s=settings.lease_silence_s,
        bad_slot_s=settings.bad_slot_s,
        hold_limit_s=settings.hold_limit_ms / 1e3,
        table=table_rules(settings, secret),
        curation=curation_rules(settings),
        replicas=ReplicaRules(
            in_flight=settings.replica_reads,
            in_flight_bytes=settings.replica_buffer_bytes,
            bytes_per_s=settings.replica_bytes_per_s,
        ),
        ssd=ssd_rules(settings),
    )
