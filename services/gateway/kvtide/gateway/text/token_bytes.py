"""The bytes that each token stands for in an answer."""

import json
import re
from typing import Any, cast

from tokenizers import Tokenizer

from kvtide.gateway.errors import ModelTextError
from kvtide.gateway.reading import TAGS
from kvtide.gateway.text.tokenizer_json import TokenizerFile

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class TokenBytes:
    """A table from token id to bytes, filled as tokens are met.

    Byte-level BPE (GPT-2, Llama 3, Qwen) and SentencePiece-like decoders with or without
    byte fallback (Llama 2, Mistral) are bytes token by token. Special tokens have no
    text, but for the tags that readers of answers look for. Unlike the tokenizer's own ``decode`` nothing is stripped from the first
    token: an answer goes on after a prompt, it never begins a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read the decoder.

        Raises:
            ModelTextError: the tokenizer's decoder is of another kind.
        """
        self._tokenizer = tokenizer
        file = TokenizerFile.parse(tokenizer.to_str())
        self._special = frozenset(
            t.id for t in file.added_tokens if t.special and t.content not in TAGS
        )
        self._byte_level = False
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        for step in file.decoder_steps:
            self._read(step)
        self._table: dict[int, bytes] = {}

    def of(self, token: int) -> bytes:
        """The bytes of ``token``; none for a special or an unknown one."""
        known = self._table.get(token)
        if known is None:
            known = self._table[token] = self._make(token)
        return known

    def _read(self, step: dict[str, Any]) -> None:
        match step.get("type"):
            case "ByteLevel":
                self._byte_level = True
            case "ByteFallback":
                self._byte_fallback = True
            case "Replace":
                pattern = step.get("pattern")
                text = (
                    cast("dict[str, Any]", pattern).get("String")
                    if isinstance(pattern, dict)
                    else None
                )
                if not isinstance(text, str):
                    raise _unsupported(step)
                self._replacements.append((text, str(step.get("content", ""))))
            case "Metaspace":
                self._replacements.append((str(step.get("replacement", "▁")), " "))
            case "Fuse" | "Strip":
                pass  # about the start of a text, which an answer never is
            case _:
                raise _unsupported(step)

    def _make(self, token: int) -> bytes:
        if token in self._special:
            return b""
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            try:
                return bytes(_BYTE_OF[char] for char in piece)
            except KeyError:
                return piece.encode()  # an added token is its own text
        if self._byte_fallback and (match := _BYTE_TOKEN.match(piece)):
            return bytes((int(match[1], 16),))
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return piece.encode()


def _unsupported(step: dict[str, Any]) -> ModelTextError:
    return ModelTextError(
        f"the tokenizer's decoder {json.dumps(step)[:200]} is not supported; byte-level "
        "BPE and SentencePiece with byte fallback are"
    )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's one printable character for each byte, reversed."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
