"""How fast this worker is, measured. Pure."""


class Pace:
    """A rate in units per second: recent work over recent time.

    Both decay by half each ``half_life`` units of time measured, so that a long sample
    weighs more than a short one and old ones fade.
    """

    def __init__(
        self, initial_per_s: float, *, half_life_s: float = 10.0, seen: bool = True
    ) -> None:
        """``initial_per_s`` stands for a tenth of a second; not ``seen``: for none."""
        self._done = initial_per_s / 10 if seen else 0.0
        self._seconds = 0.1 if seen else 0.0
        self._half_life_s = half_life_s

    def add(self, units: float, seconds: float) -> None:
        """``units`` took ``seconds``; samples without time are ignored.

        None at all in some time count, too: they make the rate less.
        """
        if seconds <= 0 or units < 0:
            return
        fade = 0.5 ** (seconds / self._half_life_s)
        self._done = self._done * fade + units
        self._seconds = self._seconds * fade + seconds

    @property
    def per_s(self) -> float:
        """The rate now; 0 if nothing was seen."""
        return self._done / self._seconds if self._seconds > 0 else 0.0

    def seconds(self, units: float) -> float:
        """How long ``units`` will take; no time if nobody knows."""
        return units / self.per_s if units > 0 and self.per_s > 0 else 0.0
