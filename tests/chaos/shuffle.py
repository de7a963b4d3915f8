"""Links to NATS that say messages twice, swap neighbours or leave some out."""

import random

from tests.chaos.link import Rewrite
from typing_extensions import override

TWICE = 0.1
SWAPPED = 0.1
_PAYLOAD = (b"MSG ", b"HMSG ")


class Messages(Rewrite):
    """NATS's own frames stay whole; of messages goes on what ``passed`` says."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._left = b""

    def passed(self, frame: bytes) -> bytes:
        """What goes on of a message; here all."""
        return frame

    def feed(self, chunk: bytes) -> bytes:
        self._left += chunk
        sent: list[bytes] = []
        while frame := self._frame():
            self._left = self._left[len(frame) :]
            sent.append(self.passed(frame) if frame.startswith(_PAYLOAD) else frame)
        return b"".join(sent)

    def _frame(self) -> bytes:
        """The next whole frame of what is left, if there is one."""
        end = self._left.find(b"\r\n")
        if end < 0:
            return b""
        if self._left.startswith(_PAYLOAD):
            end += 2 + int(self._left[:end].rpartition(b" ")[2])
        return self._left[: end + 2] if len(self._left) >= end + 2 else b""


class Shuffled(Messages):
    """Some messages come twice, some after the next."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self._late = b""
        self.twice = self.swapped = 0

    @override
    def passed(self, frame: bytes) -> bytes:
        late, self._late = self._late, b""
        if not late and self._chance.random() < SWAPPED:
            self._late = frame
            self.swapped += 1
            return b""
        if self._chance.random() < TWICE:
            frame += frame
            self.twice += 1
        return frame + late


class Lossy(Messages):
    """A share of the messages on subjects with a word in them never comes."""

    def __init__(self, chance: random.Random, word: bytes, share: float) -> None:
        super().__init__(chance)
        self._word = word
        self._share = share
        self.lost = 0

    @override
    def passed(self, frame: bytes) -> bytes:
        subject = frame.split(b" ", 2)[1]
        if self._word not in subject or self._chance.random() >= self._share:
            return frame
        self.lost += 1
        return b""
