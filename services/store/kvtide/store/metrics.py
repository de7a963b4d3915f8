"""What a store shows of itself, as ``kvtide_store_…``."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtide.bus.messages import StoreLoad
from kvtide.runtime.metrics import LATENCY_BUCKETS_S
from kvtide.store.accounts import Account
from kvtide.store.ssd.health import TierState
from kvtide.store.tally import Tally


class StoreMetrics(Collector):
    """Shows what ``update`` was last given; read from any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Nothing is shown of the machine before the first ``update``."""
        self._seen: tuple[StoreLoad, int, Tally] | None = None
        self._tags: Mapping[str, bytes] = {}
        self._limits: Mapping[str, int] = {}
        self._account_of: Callable[[bytes], Account | None] = _no_account
        self.verify_s = Histogram(
            "kvtide_store_verify_seconds",
            "verification of one slot",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.ssd_s = Histogram(
            "kvtide_store_ssd_seconds",
            "one operation on the SSD, with verification",
            ["operation"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        registry.register(self)

    def update(self, load: StoreLoad, blocks: int, tally: Tally) -> None:
        """Show this from now on; the tally goes on counting."""
        self._seen = (load, blocks, tally)

    def follow_tenants(
        self,
        tags: Mapping[str, bytes],
        limits_bytes: Mapping[str, int],
        account_of: Callable[[bytes], Account | None],
    ) -> None:
        """Show what these tenants, by name, have. Others are counted, but not named."""
        self._tags, self._limits, self._account_of = tags, limits_bytes, account_of

    def collect(self) -> Iterable[Metric]:
        """All metrics at this moment."""
        if self._seen is None:
            return
        load, blocks, tally = self._seen
        yield from _gauges(load, blocks)
        yield from self._tenants()
        for name in Tally.names():
            total = CounterMetricFamily(f"kvtide_store_{name}", name.replace("_", " "))
            total.add_metric([], getattr(tally, name))
            yield total

    def _tenants(self) -> Iterable[Metric]:
        used = GaugeMetricFamily(
            "kvtide_store_tenant_used_bytes",
            "bytes of the arena that a tenant of the settings has",
            labels=["tenant"],
        )
        slots = GaugeMetricFamily(
            "kvtide_store_tenant_slots",
            "slots of the arena that a tenant of the settings has",
            labels=["tenant"],
        )
        for name, tag in self._tags.items():
            account = self._account_of(tag)
            used.add_metric([name], 0 if account is None else account.used_bytes)
            slots.add_metric([name], 0 if account is None else account.slots)
        yield used
        yield slots
        limits = GaugeMetricFamily(
            "kvtide_store_tenant_limit_bytes",
            "most bytes of the arena that a tenant may have",
            labels=["tenant"],
        )
        for name, most in self._limits.items():
            limits.add_metric([name], most)
        yield limits


def _no_account(_tag: bytes) -> Account | None:
    return None


def _gauges(load: StoreLoad, blocks: int) -> Iterable[Metric]:
    slots = GaugeMetricFamily(
        "kvtide_store_slots", "slots of the arena by state", labels=["state"]
    )
    for state, count in (
        ("free", load.free_slots),
        ("used", load.used_slots),
        ("reserved", load.reserved_slots),
        ("quarantined", load.quarantined_slots),
    ):
        slots.add_metric([state], count)
    yield slots
    ssd = GaugeMetricFamily(
        "kvtide_store_ssd_bytes", "bytes of the SSD tier by state", labels=["state"]
    )
    for state, count in (
        ("free", load.ssd_free_bytes),
        ("used", load.ssd_used_bytes),
        ("reserved", load.ssd_reserved_bytes),
        ("garbage", load.ssd_garbage_bytes),
    ):
        ssd.add_metric([state], count)
    yield ssd
    states = GaugeMetricFamily(
        "kvtide_store_ssd_state", "1 for the state of the SSD tier", labels=["state"]
    )
    for each in TierState:
        states.add_metric([each.value], load.ssd_state == each.value)
    yield states
    for name, text, value in (
        ("used_bytes", "bytes of committed blocks", load.used_bytes),
        ("capacity_bytes", "bytes of the arena", load.capacity_bytes),
        ("backed_bytes", "bytes of it that have memory", load.backed_bytes),
        ("leases", "leases that are held", load.leases),
        ("pins", "slots that a lease pins", load.pins),
        ("hard_pins", "slots that people keep for good", load.hard_pins),
        ("soft_pins", "slots that people keep for a time", load.soft_pins),
        ("tenants", "tenants that have a slot", load.tenants),
        ("blocks", "blocks that others may read", blocks),
        ("ssd_blocks", "blocks on the SSD", load.ssd_blocks),
        ("gossip_seq", "number of the newest change told", load.seq),
    ):
        gauge = GaugeMetricFamily(f"kvtide_store_{name}", text)
        gauge.add_metric([], value)
        yield gauge
