"""What can go wrong on the bus.

BusError
├── Disconnected    there is no way to the server now; nothing was kept for later
├── BusTimeout      no reply within the time that the caller gave
├── NoResponder     nobody listens on that subject
├── BusClosed       this bus was closed
├── Interrupted     asked to stop before the server was ever reached
├── WireError       bytes that are no message; ``reason`` is what is counted
└── EpochError      the file that keeps a node's epoch can't be used
"""

from kvtide.runtime import KvtideError


class BusError(KvtideError):
    """A message could not be sent, answered or understood."""


class Disconnected(BusError):  # noqa: N818 - what happened, in one word
    """There is no connection to the server now. The message was not kept."""


class BusTimeout(BusError):  # noqa: N818 - what happened, in two words
    """No reply came in time; the message may or may not have been handled."""

    def __init__(self, message: str, *, subject: str, timeout_s: float) -> None:
        """Keep where and how long."""
        super().__init__(message)
        self.subject = subject
        self.timeout_s = timeout_s


class Interrupted(BusError):  # noqa: N818 - what happened, in one word
    """The process was asked to stop while it still waited for the server."""


class NoResponder(BusError):  # noqa: N818 - what happened, in two words
    """Nobody listens on the subject: the node is gone or not there yet."""

    def __init__(self, message: str, *, subject: str) -> None:
        """Keep where."""
        super().__init__(message)
        self.subject = subject


class BusClosed(BusError):  # noqa: N818 - what happened, in two words
    """The bus was closed by its owner."""


class WireError(BusError):
    """Bytes that are not a message of ours.

    ``reason`` is one of the words of ``DropReason``; ``node`` the sender, if known.
    """

    def __init__(self, message: str, *, reason: str, node: str = "") -> None:
        """Keep the word to count and who sent it."""
        super().__init__(message)
        self.reason = reason
        self.node = node


class EpochError(BusError):
    """The file that keeps a node's epoch can't be read or written."""

    def __init__(self, message: str, *, path: str) -> None:
        """Keep which file."""
        super().__init__(message)
        self.path = path
