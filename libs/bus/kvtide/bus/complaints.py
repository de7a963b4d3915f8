"""How often the log says that something was wrong, however often it is. Pure."""

from dataclasses import dataclass, field

MINUTE_S = 60.0


@dataclass(slots=True)
class _Minute:
    began_s: float
    said: int = 0
    unsaid: int = 0


@dataclass(slots=True)
class Complaints:
    """Bounds log lines that another process can bring about, by kind.

    The metrics count each; the log gets the first ``most_a_min`` of a kind in a minute,
    and the first of a later minute says how many had been left out. Kinds are a fixed,
    small set, never something that came from outside.
    """

    most_a_min: int = 10
    _minutes: dict[str, _Minute] = field(default_factory=dict[str, _Minute])

    def of(self, kind: str, now_s: float) -> int | None:
        """None: say nothing of this one. Else say it, and that so many were unsaid."""
        minute = self._minutes.get(kind)
        if minute is None or now_s >= minute.began_s + MINUTE_S:
            unsaid = 0 if minute is None else minute.unsaid
            self._minutes[kind] = _Minute(now_s, said=1)
            return unsaid
        if minute.said < self.most_a_min:
            minute.said += 1
            return 0
        minute.unsaid += 1
        return None
