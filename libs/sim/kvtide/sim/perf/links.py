"""Links whose flows share them: a flow gets the smaller of its two links' shares."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtide.sim.kernel import Kernel


@dataclass(slots=True, eq=False)
class _Link:
    bytes_per_s: float
    flows: "dict[int, _Flow]" = field(default_factory=dict[int, "_Flow"])

    @property
    def share(self) -> float:
        """What each of its flows may have."""
        return self.bytes_per_s / max(1, len(self.flows))


@dataclass(slots=True, eq=False)
class _Flow:
    number: int
    links: tuple[_Link, _Link]
    left: float
    done: Callable[[], None]
    rate: float = 0.0
    since_s: float = 0.0
    plan: int = 0


class Network:
    """Each host has a link out and one in. Bytes in flight share a link equally.

    A flow never gets more than its share of either link, so none carries more than it
    can; what one flow can't use because of its other end is not given to others.
    """

    def __init__(self, kernel: Kernel, bytes_per_s: float) -> None:
        """All links are equal; nothing is under way."""
        self._kernel = kernel
        self._rate = bytes_per_s
        self._links: dict[tuple[int, bool], _Link] = {}
        self._made = 0
        self.bytes_sent = 0.0

    def send(
        self, source: int, target: int, size: float, done: Callable[[], None]
    ) -> None:
        """Move ``size`` bytes from one host to another; ``done`` is called at the end."""
        if source == target or size <= 0:
            self._kernel.at(0.0, done)
            return
        self._made += 1
        self.bytes_sent += size
        links = (self._link(source, out=True), self._link(target, out=False))
        flow = _Flow(self._made, links, size, done, since_s=self._kernel.now_s)
        for link in links:
            link.flows[flow.number] = flow
        self._share(links)

    def flows(self, source: int) -> int:
        """How many leave a host."""
        return len(self._link(source, out=True).flows)

    def _link(self, host: int, *, out: bool) -> _Link:
        link = self._links.get((host, out))
        if link is None:
            link = self._links[host, out] = _Link(self._rate)
        return link

    def _share(self, links: tuple[_Link, _Link]) -> None:
        """The flows of these links get new rates, and new ends."""
        now_s = self._kernel.now_s
        touched = {**links[0].flows, **links[1].flows}
        for number in sorted(touched):
            flow = touched[number]
            one, other = flow.links
            rate = min(one.share, other.share)
            if rate == flow.rate:
                continue
            flow.left = max(0.0, flow.left - flow.rate * (now_s - flow.since_s))
            flow.rate, flow.since_s = rate, now_s
            flow.plan += 1
            plan = flow.plan
            self._kernel.at(
                flow.left / rate, lambda flow=flow, plan=plan: self._end(flow, plan)
            )

    def _end(self, flow: _Flow, plan: int) -> None:
        if plan != flow.plan:
            return
        flow.plan += 1
        for link in flow.links:
            del link.flows[flow.number]
        self._share(flow.links)
        flow.done()
