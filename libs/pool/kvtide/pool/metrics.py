"""What the pool's client counts, as ``kvtide_pool_…``."""

from collections import Counter as Counting
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvtide.pool.outcomes import ReadOutcome
from kvtide.runtime.metrics import LATENCY_BUCKETS_S


class PoolMetrics:
    """The counters of one process's client."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Make them in the registry of the process."""
        self._children: dict[tuple[Counter, str, str], Counter] = {}
        self._reads = Counter(
            "kvtide_pool_reads",
            "verified reads of blocks or parts by outcome",
            ["purpose", "outcome"],
            registry=registry,
        )
        self._bytes = Counter(
            "kvtide_pool_read_bytes",
            "bytes read and verified",
            ["purpose", "path"],
            registry=registry,
        )
        self.read_s = Histogram(
            "kvtide_pool_read_seconds",
            "one batch of reads, from call to the last verified byte",
            ["purpose"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.bad_copies = Counter(
            "kvtide_pool_bad_copies",
            "copies that were not what their descriptor says",
            ["reason"],
            registry=registry,
        )
        self.commits = Counter(
            "kvtide_pool_commits",
            "committed blocks by what the store said",
            ["state"],
            registry=registry,
        )
        self.unavailable = Counter(
            "kvtide_pool_unavailable",
            "puts that the pool did not take",
            ["code"],
            registry=registry,
        )
        self.written_bytes = Counter(
            "kvtide_pool_written_bytes",
            "bytes written into slots",
            registry=registry,
        )
        self.ready = Gauge(
            "kvtide_pool_ready",
            "1 when a store on this host takes blocks",
            registry=registry,
        )
        self.open_puts = Gauge(
            "kvtide_pool_open_puts", "puts that hold slots or pins", registry=registry
        )

    def read_all(self, purpose: str, outcomes: Sequence[ReadOutcome]) -> None:
        """Count all outcomes of a batch: most are alike, and counting one takes long."""
        counts: Counting[str] = Counting()
        moved: Counting[str] = Counting()
        for outcome in outcomes:
            counts["ok" if outcome.miss is None else outcome.miss.value] += 1
            if outcome.miss is None:
                moved[outcome.path] += outcome.nbytes
        for word, number in counts.items():
            self._kept(self._reads, purpose, word).inc(number)
        for path, nbytes in moved.items():
            self._kept(self._bytes, purpose, path).inc(nbytes)

    def _kept(self, counter: Counter, purpose: str, word: str) -> Counter:
        """A child, without the time that a look at its labels takes."""
        key = (counter, purpose, word)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = counter.labels(purpose, word)
        return child
