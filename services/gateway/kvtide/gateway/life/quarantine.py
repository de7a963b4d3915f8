"""Requests that killed their workers, by what they ask: refused for a while. Pure."""

from collections import OrderedDict

from blake3 import blake3

from kvtide.gateway.life.spec import RequestSpec

QUARANTINE_LIMIT = 4096
"""Fingerprints that are remembered; the oldest goes first."""


class Quarantine:
    """What is refused until when. Times are monotonic seconds."""

    def __init__(self, seconds: float) -> None:
        """Nothing is refused yet; 0 seconds: nothing ever is."""
        self._seconds = seconds
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def add(self, spec: RequestSpec, now_s: float) -> None:
        """Refuse the like of it from now on."""
        if not self._seconds:
            return
        mark = fingerprint(spec)
        self._until_s[mark] = now_s + self._seconds
        self._until_s.move_to_end(mark)
        while len(self._until_s) > QUARANTINE_LIMIT:
            self._until_s.popitem(last=False)

    def refuses(self, spec: RequestSpec, now_s: float) -> bool:
        """Whether a request like it killed workers not long ago."""
        if not self._until_s:
            return False
        mark = fingerprint(spec)
        until_s = self._until_s.get(mark)
        if until_s is None:
            return False
        if now_s < until_s:
            return True
        del self._until_s[mark]
        return False


def fingerprint(spec: RequestSpec) -> bytes:
    """Of the tenant, the model, the prompt and its pictures.

    Not of the draws, which don't kill.
    """
    digest = blake3(f"{spec.tenant}\0{spec.model}\0".encode())
    for token in spec.prompt:
        digest.update(token.to_bytes(4, "little"))
    for picture in spec.pictures:
        digest.update(blake3(picture).digest())
    return digest.digest()
