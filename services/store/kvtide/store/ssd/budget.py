"""How fast the tier may write: a token bucket. Pure."""


class WriteBudget:
    """``bytes_per_s`` on the mean, up to ``burst_bytes`` at once.

    A write larger than the burst is allowed when the bucket is full, and is paid for
    afterwards.
    """

    def __init__(self, bytes_per_s: float, burst_bytes: float) -> None:
        """Full at first."""
        self._rate = bytes_per_s
        self._burst = burst_bytes
        self._level = burst_bytes
        self._at_s = 0.0

    def take(self, length: int, now_s: float) -> bool:
        """Spend ``length`` bytes, if they are there."""
        self._fill(now_s)
        # a byte is forgiven: rounding must not make ``due_s`` a moment too early
        if self._level < min(length, self._burst) - 1:
            return False
        self._level -= length
        return True

    def due_s(self, length: int, now_s: float) -> float:
        """When ``take`` will agree."""
        self._fill(now_s)
        missing = min(length, self._burst) - self._level
        return now_s if missing <= 0 else now_s + missing / self._rate

    def _fill(self, now_s: float) -> None:
        gained = max(0.0, now_s - self._at_s) * self._rate
        self._level = min(self._burst, self._level + gained)
        self._at_s = max(self._at_s, now_s)
