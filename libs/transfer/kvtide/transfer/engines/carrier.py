"""Carries requests by a foreign engine: one rail, with a connection and slots of its own."""

from functools import partial

from kvtide.transfer.channel import Channel
from kvtide.transfer.dial import Dialer
from kvtide.transfer.engines.line import EngineLine
from kvtide.transfer.engines.slabs import Slabs
from kvtide.transfer.errors import TimedOut
from kvtide.transfer.handshake import Session
from kvtide.transfer.line import Line
from kvtide.transfer.rail import RailDownError, Report
from kvtide.transfer.requests import Request
from kvtide.transfer.tcp import DIAL_S, TcpCarrier


class EngineCarrier(TcpCarrier):
    """See ``TcpCarrier``: the same, but that the bytes do not go by its connection."""

    def __init__(self, name: str, dialer: Dialer, slabs: Slabs, report: Report) -> None:
        """``name`` is the thread's."""
        super().__init__(name, dialer, report)
        self.path = slabs.engine.name
        self._slabs = slabs

    def at_once(self, request: Request) -> bool:
        """See ``Carrier.at_once``: it only gets in line."""
        self.submit(request)
        return True

    def _line_on(self, channel: Channel, session: Session) -> Line:
        dialer = self._dialer
        node = dialer.address.node
        line = EngineLine(
            channel, session, node, self._clock, dialer.given_up, self._slabs
        )
        deadline_s = self._clock.monotonic() + DIAL_S
        try:
            line.open(partial(self._until, deadline_s))
        except Exception as error:  # whatever the engine raises, TCP goes on
            line.close()
            raise RailDownError(str(error), node=node, path=self.path) from error
        return line

    def _until(self, deadline_s: float) -> None:
        if self._closing:
            raise self._closed_error()
        if self._clock.monotonic() > deadline_s:
            raise TimedOut(f"no slots within {DIAL_S:g} s", path=self.path)
