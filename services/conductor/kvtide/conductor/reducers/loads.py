"""A worker's load as a policy sees it: what it reported, and what it was booked since.

What a worker reports is not believed below zero: a policy never sees a negative load.
"""

from kvtide.bus.messages import Beat, DecodeLoad, PrefillLoad
from kvtide.conductor.reducers.bookings import Bookings
from kvtide.policy import DecodeWorker, PrefillWorker

_NO_PREFILL = PrefillLoad()
_NO_DECODE = DecodeLoad()


def prefill_worker(beat: Beat, bookings: Bookings) -> PrefillWorker:
    """A prefill worker as a candidate."""
    loads = (load for load in beat.load if isinstance(load, PrefillLoad))
    load = next(loads, _NO_PREFILL)
    reported = max(0, load.queued_tokens) + max(0, load.running_tokens_left)
    return PrefillWorker(
        ref=beat.node,
        host=beat.host,
        waiting_tokens=reported + bookings.prefill_tokens(beat.node.node),
        tokens_per_s=max(0.0, load.tokens_per_s),
        load_bytes_per_s=max(0.0, load.load_bytes_per_s),
    )


def decode_worker(beat: Beat, bookings: Bookings) -> DecodeWorker:
    """A decode worker as a candidate."""
    loads = (load for load in beat.load if isinstance(load, DecodeLoad))
    load = next(loads, _NO_DECODE)
    reported = max(0, load.kv_tokens_used) + max(0, load.kv_tokens_promised)
    return DecodeWorker(
        ref=beat.node,
        host=beat.host,
        running=max(0, load.running),
        waiting=max(0, load.waiting),
        booked=bookings.decode_requests(beat.node.node),
        kv_tokens=reported + bookings.decode_tokens(beat.node.node),
        kv_tokens_capacity=max(0, load.kv_tokens_capacity),
        step_ms=max(0.0, load.step_ms),
    )
