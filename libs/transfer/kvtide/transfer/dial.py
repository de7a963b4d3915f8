"""Opening a proved connection to a peer."""

import logging
import socket
from dataclasses import dataclass, field, replace

from kvtide.runtime import Clock
from kvtide.transfer.channel import TICK_S, Channel
from kvtide.transfer.errors import TimedOut, Unreachable
from kvtide.transfer.fence import GivenUp
from kvtide.transfer.handles import EndpointAddress
from kvtide.transfer.handshake import Session, Use, greet
from kvtide.transfer.tls import Tls, channel_for

log = logging.getLogger("kvtide.transfer")


@dataclass(frozen=True, slots=True)
class Dialer:
    """Opens connections to an endpoint; ``hosts`` are its ways in, tried in order.

    ``given_up`` are those that broke with writes on them.
    """

    address: EndpointAddress
    hosts: tuple[str, ...]
    node: str
    epoch: int
    key: bytes
    clock: Clock
    tls: Tls | None = None
    given_up: GivenUp = field(default_factory=GivenUp)

    def dial(self, use: Use, timeout_s: float) -> tuple[Channel, Session]:
        """Connect and prove both ends, within ``timeout_s`` in all.

        A host that does not answer leaves time for the next.

        Raises:
            Unreachable, TimedOut, Refused, StaleEpoch: see ``TransferEndpoint.connect``.
        """
        deadline_s = self.clock.monotonic() + timeout_s
        for left in range(len(self.hosts), 1, -1):
            share_s = max(0.0, deadline_s - self.clock.monotonic()) / left
            try:
                return self._dial_host(self.hosts[-left], use, share_s)
            except (Unreachable, TimedOut) as error:
                log.info("trying the next way: %s", error)
        left_s = max(0.0, deadline_s - self.clock.monotonic())
        return self._dial_host(self.hosts[-1], use, left_s)

    def only(self, host: str) -> "Dialer":
        """For one of the ways alone."""
        return replace(self, hosts=(host,))

    def _dial_host(
        self, host: str, use: Use, timeout_s: float
    ) -> tuple[Channel, Session]:
        deadline_s = self.clock.monotonic() + timeout_s
        where = f"{host}:{self.address.port}"
        node = self.address.node

        def check() -> None:
            if self.clock.monotonic() >= deadline_s:
                raise TimedOut(
                    f"no answer from {where} within {timeout_s:g} s", node=node
                )

        try:
            sock = socket.create_connection(
                (host, self.address.port), timeout=max(0.001, timeout_s)
            )
        except TimeoutError as error:
            raise TimedOut(
                f"no connection to {where} within {timeout_s:g} s", node=node
            ) from error
        except OSError as error:
            raise Unreachable(
                f"nobody answers at {where}: {error}", node=node
            ) from error
        channel = channel_for(sock, self.tls, server=False)
        channel.tick(min(TICK_S, max(0.01, timeout_s / 4)))
        try:
            channel.open(check)
            us = (self.node, self.epoch)
            session = greet(channel, self.key, us, self.address, use, check)
        except OSError as error:
            channel.close()
            raise Unreachable(
                f"{where} hung up before its proof: {error}", node=node
            ) from error
        except BaseException:
            channel.close()
            raise
        channel.tick(TICK_S)
        return channel, session
