"""A link to NATS that says messages twice and swaps neighbours."""

import random

from tests.chaos.link import Rewrite

TWICE = 0.1
SWAPPED = 0.1
_PAYLOAD = (b"MSG ", b"HMSG ")


class Shuffled(Rewrite):
    """NATS's own frames stay whole; some messages come twice, some after the next."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._left = b""
        self._late = b""
        self.twice = self.swapped = 0

    def feed(self, chunk: bytes) -> bytes:
        self._left += chunk
        sent: list[bytes] = []
        while frame := self._frame():
            self._left = self._left[len(frame) :]
            sent.append(self._shuffled(frame) if frame.startswith(_PAYLOAD) else frame)
        return b"".join(sent)

    def _frame(self) -> bytes:
        """The next whole frame of what is left, if there is one."""
        end = self._left.find(b"\r\n")
        if end < 0:
            return b""
        if self._left.startswith(_PAYLOAD):
            end += 2 + int(self._left[:end].rpartition(b" ")[2])
        return self._left[: end + 2] if len(self._left) >= end + 2 else b""

    def _shuffled(self, frame: bytes) -> bytes:
        late, self._late = self._late, b""
        if not late and self._chance.random() < SWAPPED:
            self._late = frame
            self.swapped += 1
            return b""
        if self._chance.random() < TWICE:
            frame += frame
            self.twice += 1
        return frame + late
