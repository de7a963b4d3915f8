"""The errors of a load.

LoadError
├── NoServerError    nothing there answers as OpenAI's API does
└── EndedTwiceError  a request was given a second outcome: a fault of ours
"""

from kvtide.runtime import KvtideError


class LoadError(KvtideError):
    """A load can't be made."""


class NoServerError(LoadError):
    """Nothing at ``url`` answers as OpenAI's API does."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url} does not answer: {reason}")
        self.url = url
        self.reason = reason


class EndedTwiceError(LoadError):
    """A request was given a second outcome."""

    def __init__(self, conversation: int, turn: int) -> None:
        super().__init__(f"turn {turn} of conversation {conversation} ended twice")
        self.conversation = conversation
        self.turn = turn
