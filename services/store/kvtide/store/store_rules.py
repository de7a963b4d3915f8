"""The limits of a store's machine."""

from dataclasses import dataclass, field

from kvtide.store.curation import CurationRules
from kvtide.store.replicas import ReplicaRules
from kvtide.store.slot_states import TableRules
from kvtide.store.ssd.rules import SsdRules


@dataclass(frozen=True, slots=True)
class StoreRules:
    """The machine's limits; times in seconds."""

    arena_bytes: int
    slab_bytes: int = 32 << 20
    gossip_delay_s: float = 0.02
    silence_s: float = 10.0
    bad_slot_s: float = 30.0
    hold_limit_s: float = 10.0
    page_limit: int = 1000
    keys_limit: int = 8192
    table: TableRules = field(default_factory=TableRules)
    curation: CurationRules = field(default_factory=CurationRules)
    replicas: ReplicaRules = field(default_factory=ReplicaRules)
    ssd: SsdRules = field(default_factory=SsdRules)
