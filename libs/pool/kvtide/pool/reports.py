"""Bad copies, told to their stores: each once in a while, never in the way."""

from collections import OrderedDict

from kvtide.bus import BusError, Node
from kvtide.bus.messages import BadCopy
from kvtide.bus.subjects import Hop
from kvtide.kv import Located, Role, SlotRef
from kvtide.pool.limits import PoolLimits
from kvtide.pool.metrics import PoolMetrics
from kvtide.pool.outcomes import MissReason
from kvtide.runtime import LimitError, TaskScope


class BadCopyReports:
    """Publishes ``BadCopy``; a lost one is repaired by the next reader's."""

    def __init__(
        self, node: Node, tasks: TaskScope, limits: PoolLimits, metrics: PoolMetrics
    ) -> None:
        """Nothing has been reported."""
        self._node = node
        self._tasks = tasks
        self._limits = limits
        self._metrics = metrics
        self._lately: OrderedDict[SlotRef, float] = OrderedDict()

    def report(self, located: Located, reason: MissReason, detail: str) -> None:
        """Have the store look for itself; never waits, never fails."""
        self._metrics.bad_copies.labels(reason.value).inc()
        now_s = self._node.clock.monotonic()
        last_s = self._lately.get(located.slot)
        if last_s is not None and now_s < last_s + self._limits.report_again_s:
            return
        self._lately[located.slot] = now_s
        self._lately.move_to_end(located.slot)
        if len(self._lately) > self._limits.reports:
            self._lately.popitem(last=False)
        if len(self._tasks) < self._limits.reports:
            self._tasks.spawn(self._send(located, detail), name="bad copy")

    async def _send(self, located: Located, detail: str) -> None:
        subject = self._node.subjects.inbox(Role.STORE, located.slot.node, Hop.QUERY)
        try:
            report = BadCopy(located=located, reason=detail)
            await self._node.bus.publish(subject, report)
        except (BusError, LimitError):
            # the next reader that meets it will say so
            return
