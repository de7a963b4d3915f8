"""After a failure nothing is asked for a while, so that waits do not add up. Pure."""

from dataclasses import dataclass


@dataclass(slots=True)
class Rest:
    """Rests ``rest_s`` after each failure, twice as long each time up to ``limit_s``."""

    rest_s: float
    limit_s: float
    _until_s: float = float("-inf")
    _failures: int = 0

    def over(self, now_s: float) -> bool:
        """Whether one may try."""
        return now_s >= self._until_s

    def failed(self, now_s: float) -> None:
        """It did not work: leave it alone for a while."""
        self._until_s = now_s + min(self.rest_s * 2**self._failures, self.limit_s)
        self._failures = min(self._failures + 1, 16)

    def worked(self) -> None:
        """It worked."""
        self._failures = 0
        self._until_s = float("-inf")
