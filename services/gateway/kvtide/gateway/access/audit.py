"""The audit log as the gateway writes it: behind, bounded, and never a flood."""

import secrets
from collections import OrderedDict
from dataclasses import dataclass

from kvtide.catalog import AuditRow, Writer
from kvtide.gateway.access.keyring import Refused
from kvtide.runtime import Clock

REPEAT_S = 60.0
MOST_KNOWN = 1024
"""Failures that are told apart; who makes up more has them counted as one."""

_OTHERS = "others"


@dataclass(slots=True)
class _Failure:
    told_s: float
    untold: int = 0


class AuditBook:
    """Writes entries; the same failure at most once in ``REPEAT_S``, with a count."""

    def __init__(self, writer: Writer, clock: Clock) -> None:
        """``writer`` is started and ended by its owner."""
        self._writer = writer
        self._clock = clock
        self._failures: OrderedDict[tuple[str, Refused], _Failure] = OrderedDict()

    def note(
        self, actor: str, action: str, target: str, outcome: str, detail: str = ""
    ) -> None:
        """Something was done, or tried."""
        self._writer.put(
            AuditRow(
                entry=secrets.token_hex(16),
                at_s=self._clock.wall(),
                actor=actor,
                action=action,
                target=target,
                outcome=outcome,
                detail=detail,
            )
        )

    def key_failed(self, prefix: str | None, why: Refused, client: str) -> None:
        """A key was shown that opens nothing. ``prefix`` None: it is no key at all."""
        now_s = self._clock.monotonic()
        shown = prefix or "malformed"
        mark = (shown, why)
        if mark not in self._failures and len(self._failures) >= MOST_KNOWN:
            self._forget(now_s)
            if len(self._failures) >= MOST_KNOWN:
                mark = (_OTHERS, why)
        failure = self._failures.get(mark)
        if failure is not None and now_s - failure.told_s < REPEAT_S:
            failure.untold += 1
            return
        untold = failure.untold if failure is not None else 0
        self._failures[mark] = _Failure(now_s)
        detail = f"from {client}"
        if untold:
            detail += f"; {untold} more since the last entry"
        self.note(mark[0], "key.use", "", why.value, detail)

    def _forget(self, now_s: float) -> None:
        old = [
            mark
            for mark, failure in self._failures.items()
            if now_s - failure.told_s >= REPEAT_S and not failure.untold
        ]
        for mark in old:
            del self._failures[mark]
