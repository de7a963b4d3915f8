"""What every message is: a frozen, tagged struct.

On the wire a message is a MessagePack map whose ``t`` names its type, so that a
reader without these types still sees names and values.
"""

import msgspec


class Message(msgspec.Struct, frozen=True, tag_field="t", kw_only=True):
    """The base of all messages. Durations are in milliseconds and relative."""


class Ack(Message, frozen=True, tag="ack"):
    """The receiver has taken the message (again, if it was a repeat)."""


class Failure(Message, frozen=True, tag="failure"):
    """The receiver could not handle a request message.

    ``code`` is a short stable word; ``reason`` is for people.
    """

    code: str
    reason: str
