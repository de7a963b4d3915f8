"""Gives a peer's requests to its rails, tries again what failed, ends what is over."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtide.runtime import Clock
from kvtide.transfer.alarm import Alarm
from kvtide.transfer.errors import (
    Corrupt,
    Refused,
    StaleEpoch,
    TimedOut,
    TransferError,
    Unreachable,
)
from kvtide.transfer.interface import Observer
from kvtide.transfer.rail import Carrier, RailDownError, Report
from kvtide.transfer.requests import Request
from kvtide.transfer.schedule import Rail, Schedule
from kvtide.transfer.transfer import Transfer

log = logging.getLogger("kvtide.transfer")

MakeCarrier = Callable[[Report], Carrier]
_AGAIN = (Corrupt, Unreachable, TimedOut)


@dataclass(frozen=True, slots=True)
class RailReport:
    """What is known of a rail to a peer, for people and metrics."""

    name: str
    path: str
    moved_bytes: int
    failures: int
    paused_s: float
    bandwidth_bytes_s: float


class Dispatcher:
    """See the module. Thread-safe."""

    def __init__(
        self,
        node: str,
        rails: Sequence[tuple[Rail, MakeCarrier]],
        clock: Clock,
        alarm: Alarm,
        observer: Observer | None,
        outcast: Callable[[TransferError], None],
    ) -> None:
        """``outcast`` is told when the peer does not accept us any more."""
        self._node = node
        self._clock = clock
        self._alarm = alarm
        self._observer = observer
        self._outcast = outcast
        self._lock = threading.Lock()
        self._schedule: Schedule[Request] = Schedule([rail for rail, _ in rails])
        self._carriers = [make(self._report) for _, make in rails]
        self._end: TransferError | None = None
        self._wake_s: float | None = None

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; they are settled in the end, whatever happens."""
        with self._lock:
            end = self._end
            if end is None:
                for request in requests:
                    self._schedule.put(request)
        if end is None:
            self._go_on()
            return
        for request in requests:
            request.transfer.fail(end)
            request.settle()

    def at_once(self, request: Request) -> Carrier | None:
        """Have a request taken by a rail, and sent if it can be; None: nothing was done.

        For a request whose local memory lies equally near to all rails. Never blocks.
        """
        with self._lock:
            if self._end is not None:
                return None
            transfer, nbytes = request.transfer, request.nbytes
            index = self._schedule.assign_at_once(
                nbytes, transfer.priority, transfer.started_s
            )
            if index is None:
                return None
            carrier = self._carriers[index]
        request.rail = index
        request.path = carrier.path
        if carrier.at_once(request):
            return carrier
        with self._lock:
            self._schedule.returned(index, request.nbytes)
        return None

    def abort(self, transfer: Transfer) -> None:
        """Settle what waits of a failed transfer, and stop what runs."""
        with self._lock:
            mine = self._schedule.take_out(lambda each: each.transfer is transfer)
        for request in mine:
            request.settle()
        for carrier in self._carriers:
            carrier.abort(transfer)

    def help(self, transfer: Transfer) -> None:
        """Let the calling thread, which waits for ``transfer``, work for it."""
        for carrier in self._carriers:
            if transfer.done():
                return
            carrier.help(transfer)

    def finish(self, error: TransferError) -> None:
        """End all for ever."""
        with self._lock:
            if self._end is not None:
                return
            self._end = error
            left = self._schedule.take_out(lambda _: True)
        for request in left:
            request.transfer.fail(error)
            request.settle()
        for carrier in self._carriers:
            carrier.abort(None)

    def add(self, rail: Rail, make: MakeCarrier) -> None:
        """A way to the peer appears: it gets its share from now on."""
        carrier = make(self._report)
        with self._lock:
            if self._end is None:
                index = self._schedule.add(rail)
                if index == len(self._carriers):
                    self._carriers.append(carrier)
                else:
                    self._carriers[index] = carrier
            end = self._end
        if end is None:
            self._go_on()
        else:
            carrier.abort(None)
            carrier.join()

    def remove(self, name: str) -> None:
        """A way to the peer is gone: what is on it goes elsewhere, at no cost.

        Waits for the end of the rail's thread, so not for that thread.
        """
        with self._lock:
            index = self._schedule.remove(name)
            if index is None:
                return
            carrier = self._carriers[index]
        carrier.abort(None)
        carrier.join()
        self._go_on()

    def join(self) -> None:
        """Wait for the rails' threads, after ``finish``."""
        for carrier in self._carriers:
            carrier.join()

    def reports(self) -> list[RailReport]:
        """What is known of each rail now."""
        now_s = self._clock.monotonic()
        with self._lock:
            return [
                RailReport(
                    rail.name,
                    carrier.path,
                    rail.moved_bytes,
                    rail.failures,
                    max(0.0, rail.paused_until_s - now_s),
                    rail.bandwidth_bytes_s,
                )
                for rail, carrier in zip(
                    self._schedule.rails, self._carriers, strict=True
                )
                if not rail.gone
            ]

    def _go_on(self) -> None:
        """Hand out what can go now; see to it that the rest does later."""
        now_s = self._clock.monotonic()
        with self._lock:
            if not self._schedule:
                return
            assigned = self._schedule.assign(now_s)
            wake_s = self._schedule.wake_s(now_s)
            if wake_s == self._wake_s:
                wake_s = None
            else:
                self._wake_s = wake_s
        for request, rail in assigned:
            request.rail = rail
            request.path = self._carriers[rail].path
            self._carriers[rail].submit(request)
        if wake_s is not None:
            self._alarm.at(wake_s, self._go_on)

    def _report(
        self, request: Request, error: TransferError | None, blame: bool
    ) -> None:
        """See ``rail.Report``; from a carrier's thread."""
        now_s = self._clock.monotonic()
        if error is None:
            with self._lock:
                more = self._schedule.finished(request.rail, request.nbytes, now_s)
            request.settle()
            if more:
                self._go_on()
            return
        with self._lock:
            if blame:
                self._schedule.failed(request.rail, request.nbytes, now_s)
            else:
                self._schedule.returned(request.rail, request.nbytes)
        # opening a rail is tried as long as the deadline allows, with longer pauses
        free = not blame or isinstance(error, RailDownError)
        if self._again(request, error, free=free):
            self.submit([request])
        else:
            request.settle()
            self._go_on()

    def _again(self, request: Request, error: TransferError, *, free: bool) -> bool:
        """Whether to try once more; if not, the transfer has failed."""
        transfer = request.transfer
        if self._end is not None:
            transfer.fail(self._end)
        if transfer.failed:
            return False
        if transfer.remaining_s() <= 0:
            transfer.expire()
            return False
        if isinstance(error, _AGAIN) and (free or transfer.spend_retry()):
            if not free:
                log.info("trying again: %s", error)
                if self._observer is not None:
                    self._observer.retried(request.path, transfer.purpose, error.kind)
            return True
        transfer.fail(error)
        if isinstance(error, (Refused, StaleEpoch)):
            self._outcast(error)
        return False
