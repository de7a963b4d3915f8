"""Whether the tier can be read and written, and when to try again. Pure."""

from enum import StrEnum

from kvtide.store.ssd.rules import SsdRules


class TierState(StrEnum):
    """``read_only``: what is there is served, and nothing is demoted."""

    OFF = "off"
    OPENING = "opening"
    READY = "ready"
    READ_ONLY = "read_only"
    OUT = "out"


class _BackOff:
    """Doubles from failure to failure, and starts anew after a calm time."""

    def __init__(self, rules: SsdRules) -> None:
        self._rules = rules
        self._wait_s = rules.retry_s
        self._failed_s = float("-inf")

    def next_s(self, now_s: float) -> float:
        if now_s > self._failed_s + self._wait_s + self._rules.calm_s:
            self._wait_s = self._rules.retry_s
        at_s = now_s + self._wait_s
        self._failed_s = now_s
        self._wait_s = min(self._wait_s * 2, self._rules.retry_most_s)
        return at_s


class TierHealth:
    """See the module; ``reason`` says what is wrong, empty when nothing is."""

    def __init__(self, rules: SsdRules) -> None:
        """To be opened at once, if there is a tier."""
        self.state = TierState.OUT if rules.capacity_bytes else TierState.OFF
        self.reason = ""
        self._rules = rules
        self._open_back_off = _BackOff(rules)
        self._write_back_off = _BackOff(rules)
        self._retry_s = float("-inf")
        self._read_failures = 0

    @property
    def readable(self) -> bool:
        """Whether blocks are there to be read."""
        return self.state in (TierState.READY, TierState.READ_ONLY)

    @property
    def writable(self) -> bool:
        """Whether blocks can be demoted."""
        return self.state is TierState.READY

    @property
    def retry_at_s(self) -> float | None:
        """When something that failed is to be tried again."""
        waits = self.state in (TierState.OUT, TierState.READ_ONLY)
        return self._retry_s if waits else None

    def open_now(self, now_s: float) -> bool:
        """Whether the directory is to be opened now; then it is being opened."""
        if self.state is not TierState.OUT or now_s < self._retry_s:
            return False
        self.state = TierState.OPENING
        return True

    def write_now(self, now_s: float) -> bool:
        """Whether writing is to be tried again now; then it counts as possible."""
        if self.state is not TierState.READ_ONLY or now_s < self._retry_s:
            return False
        self.state, self.reason = TierState.READY, ""
        return True

    def opened(self) -> None:
        """All that is there can be read."""
        self.state, self.reason, self._read_failures = TierState.READY, "", 0

    def read_well(self) -> None:
        """A read succeeded."""
        self._read_failures = 0

    def read_failed(self, reason: str, now_s: float) -> bool:
        """A read failed; true: too many did, one after the other, and the tier is out."""
        self._read_failures += 1
        if self._read_failures < self._rules.read_failures:
            return False
        self.out(reason, now_s)
        return True

    def out(self, reason: str, now_s: float) -> None:
        """Nothing of it can be had for now."""
        self.state, self.reason = TierState.OUT, reason
        self._retry_s = self._open_back_off.next_s(now_s)

    def writes_out(self, reason: str, now_s: float) -> None:
        """It can't be written for now."""
        if self.state is TierState.READY:
            self.state, self.reason = TierState.READ_ONLY, reason
            self._retry_s = self._write_back_off.next_s(now_s)
