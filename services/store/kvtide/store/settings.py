"""Settings of a store."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr

from kvtide.runtime.settings import RoleSettings


class StoreSettings(RoleSettings):
    """``kvtide store``."""

    dram_bytes: int = Field(
        default=0,
        ge=0,
        description="size of the DRAM arena; 0: a quarter of the free shared memory, "
        "at most 2 GiB. Memory is taken as blocks come",
    )
    slab_bytes: int = Field(
        default=32 << 20,
        ge=1 << 12,
        description="how much of the arena a block size gets at a time",
    )
    gossip_delay_ms: float = Field(
        default=15.0,
        gt=0,
        le=1000,
        description="how long changes are gathered before the others are told",
    )
    lease_silence_s: float = Field(
        default=10.0,
        gt=0,
        description="silence of a writer after which its unfinished slots are "
        "quarantined",
    )
    bad_slot_s: float = Field(
        default=30.0,
        gt=0,
        description="how long a slot rests whose bytes were found wrong",
    )
    hold_limit_ms: float = Field(
        default=10_000.0,
        ge=0,
        description="longest time that a placement keeps its blocks from eviction",
    )
    verify_threads: int = Field(
        default=2, ge=1, le=64, description="threads that verify what was written"
    )
    replica_bytes_per_s: float = Field(
        default=256e6,
        gt=0,
        description="mean rate at which copies of other stores' blocks are fetched",
    )
    replica_buffer_bytes: int = Field(
        default=64 << 20,
        ge=1 << 16,
        description="bytes of such copies that may be under way at once",
    )
    replica_reads: int = Field(
        default=16,
        ge=1,
        le=256,
        description="such copies that may be under way at once",
    )
    ssd_bytes: int = Field(
        default=0,
        ge=0,
        description="size of the SSD tier, at most nine tenths of what its disk has "
        "left; 0: none",
    )
    ssd_dir: Path | None = Field(
        default=None,
        description="directory of the SSD tier, of this node alone; empty: "
        "STATE_DIR/ssd/NODE",
    )
    ssd_segment_bytes: int = Field(
        default=64 << 20,
        ge=1 << 16,
        description="how much is appended to a file of the SSD tier",
    )
    ssd_write_bytes_per_s: float = Field(
        default=200e6,
        gt=0,
        description="mean rate at which the SSD tier is written at most",
    )
    ssd_save_s: float = Field(
        default=1.0,
        ge=0,
        description="age at which a block that only DRAM has is copied to the SSD ahead "
        "of need, so that a crash loses no older ones; 0: only when it leaves DRAM",
    )
    ssd_flush_s: float = Field(
        default=5.0,
        ge=0,
        description="how long a clean stop may write to the SSD what DRAM alone has",
    )
    ssd_read_threads: int = Field(
        default=4, ge=1, le=64, description="reads of the SSD tier at once"
    )
    ssd_key_file: Path | None = Field(
        default=None,
        description="file with the key, in hex, that tenants' keys for the SSD tier are "
        "wrapped with, equal for all stores; set: blocks on SSD are encrypted",
    )
    ssd_key_secret: SecretStr | None = Field(
        default=None,
        description="that key itself, in the environment (KVTIDE_SSD_KEY_SECRET)",
    )
    ssd_plain: Literal["read", "refuse"] = Field(
        default="read",
        description="what becomes of blocks that were written to the SSD tier before "
        "it was encrypted",
    )
    ssd_high: float = Field(
        default=0.85,
        gt=0,
        lt=1,
        description="share of the SSD tier in use above which cold blocks go",
    )
    ssd_low: float = Field(
        default=0.8, gt=0, lt=1, description="share at which no more of them go"
    )
    ssd_promote_hits: int = Field(
        default=2,
        ge=1,
        le=255,
        description="reads of a block on SSD after which it stays in DRAM",
    )
    ssd_stage_share: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="share of the arena that blocks on their way from the SSD may take",
    )
    dram_high: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="share of the arena in use above which cold blocks go to the SSD",
    )
    dram_low: float = Field(
        default=0.85, gt=0, le=1, description="share at which no more of them go"
    )
    eviction: Literal["lru", "s3fifo"] = Field(
        default="lru",
        description="which block goes when room is needed: the longest unused, or by "
        "S3-FIFO, which keeps what was used twice from those used once",
    )
    fair_shares: bool = Field(
        default=True,
        description="make room at the tenant that has the most for its weight, so that "
        "a flood of one evicts its own blocks first",
    )
    share_idle_s: float = Field(
        default=600.0,
        gt=0,
        description="a tenant that uses nothing for so long has no share any more",
    )
    tenant_weights: dict[str, Annotated[float, Field(gt=0, le=1000)]] = Field(
        default_factory=dict[str, float],
        description="weights of tenants' shares of the arena, by name; 1 if not here",
    )
    tenant_limit_bytes: dict[str, Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict[str, int],
        description="most bytes of the arena that a tenant may have, by name",
    )
    hard_pin_share: float = Field(
        default=0.25,
        ge=0,
        le=0.9,
        description="share of the arena that people may pin for good",
    )
    soft_pin_limit_s: float = Field(
        default=86_400.0, gt=0, description="longest time that people may pin a block"
    )
    host_reserve_bytes: int = Field(
        default=0,
        ge=0,
        description="memory that is left to the host: below it the arena gives some "
        "back, below twice of it it does not grow; 0: 2 % of the memory, at most 1 GiB",
    )
    host_pressure_percent: float = Field(
        default=20.0,
        gt=0,
        description="time that processes wait for memory (PSI, some, 10 s) above which "
        "the arena gives some back",
    )
    host_check_s: float = Field(
        default=1.0, gt=0, description="how often the host's memory is looked at"
    )
    deletions_check_s: float = Field(
        default=60.0,
        gt=0,
        description="how often the catalog is asked for deletions that were not heard of",
    )
    dram_keep_bytes: int = Field(
        default=64 << 20,
        ge=0,
        description="memory that the arena keeps however short the host is",
    )
    drain_timeout_s: float = Field(
        default=3.0, gt=0, description="limit for each step of a clean stop"
    )
