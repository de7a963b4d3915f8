"""The bounds that protect a process from its bus."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BusLimits:
    """Bytes, counts and seconds; the defaults are the design's.

    A body above ``inline_bytes`` travels as a blob reference; one above
    ``blob_bytes`` is refused. The shelf of blobs that others may still fetch holds at
    most ``shelf_bytes`` and ``shelf_count``, each for ``blob_ttl_s``. At most ``fetches``
    bodies are fetched at once, each within ``fetch_timeout_s`` in all: a peer that has
    stopped holds up nobody for as long as anyone has patience. Each
    subscription keeps at most ``waiting_bytes`` beside its own count. At most
    ``unsent_bytes`` wait for the socket before a publish counts as disconnected.
    """

    inline_bytes: int = 256 * 1024
    blob_bytes: int = 64 * 1024 * 1024
    shelf_bytes: int = 256 * 1024 * 1024
    shelf_count: int = 1024
    blob_ttl_s: float = 60.0
    fetch_timeout_s: float = 2.5
    fetches: int = 16
    waiting_bytes: int = 64 * 1024 * 1024
    unsent_bytes: int = 32 * 1024 * 1024
    pending_requests: int = 65_536
    ping_s: float = 3.0
    connect_timeout_s: float = 5.0
    reconnect_wait_s: float = 0.25
    drain_timeout_s: float = 5.0
