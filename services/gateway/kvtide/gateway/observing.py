"""Who looks on at the requests of a gateway, without a say in them."""

from kvtide.bus.messages import RequestEnded
from kvtide.gateway.life import Event, RequestSpec
from kvtide.kv import KeySpace, RequestId


class Observer:
    """Called in the gateway's loop: must be quick and not raise. Does nothing itself."""

    def arrived(self, spec: RequestSpec, space: KeySpace) -> None:
        """A request was taken; its keys are of ``space``."""

    def told(self, request: RequestId, event: Event) -> None:
        """A request's life is about to be told something, ticks left out."""

    def ended(self, record: RequestEnded) -> None:
        """A request has had its terminal answer, whichever."""
