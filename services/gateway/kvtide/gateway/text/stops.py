"""Stop strings in text that comes in pieces. Pure."""

from collections.abc import Sequence

from kvtide.gateway.reading.overlap import overlap


class StopStrings:
    """Passes text on until a stop string is complete, and never a part of one.

    The stop string that is complete first wins (of those complete at the same
    character the one that began first), so the result does not depend on how the text
    was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """``stops`` are non-empty strings; none at all passes everything on."""
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self._hit: str | None = None

    @property
    def hit(self) -> str | None:
        """The stop string that ended the text."""
        return self._hit

    def push(self, text: str) -> str:
        """More text; what of it, and of what was held, is certain now."""
        if self._hit is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        end = self._find(text)
        if end is not None:
            self._held = ""
            return text[:end]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The end has come without a stop string: what was held is text."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> int | None:
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if not found:
            return None
        _, start, self._hit = min(found)
        return start
