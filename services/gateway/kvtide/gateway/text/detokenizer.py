"""Tokens to text, one at a time, never splitting a character."""

import codecs

from kvtide.gateway.text.token_bytes import TokenBytes


class Detokenizer:
    """Joins the bytes of tokens and gives out whole characters.

    The pieces joined equal the UTF-8 decoding of all bytes at once, for every split:
    a byte that can't be part of a character becomes U+FFFD as soon as that is certain.
    """

    def __init__(self, table: TokenBytes) -> None:
        """Start an answer."""
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that are complete after one more token."""
        return self._decoder.decode(self._table.of(token))

    def flush(self) -> str:
        """The end: bytes of a character that never became whole, as U+FFFD."""
        return self._decoder.decode(b"", final=True)
