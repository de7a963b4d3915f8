"""What the life of a request needs of text: a seam, with a fake for simulations."""

from typing import Protocol


class TextSink(Protocol):
    """Turns the tokens of one answer into its text. Pure, called in order."""

    @property
    def hit(self) -> bool:
        """Whether a stop string is complete: the text ends before it."""
        ...

    def push(self, token: int) -> str:
        """The text that is certain after one more token (maybe none)."""
        ...

    def finish(self) -> str:
        """The text that was held back. Called once, after the last token."""
        ...


class NoText:
    """Ignores text, for simulations and for answers of which only ids matter."""

    @property
    def hit(self) -> bool:
        """See ``TextSink.hit``."""
        return False

    def push(self, token: int) -> str:
        """See ``TextSink.push``."""
        del token
        return ""

    def finish(self) -> str:
        """See ``TextSink.finish``."""
        return ""
