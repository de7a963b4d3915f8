"""Prompts as text of a wanted length in tokens, without a tokenizer.

Each word here is one token, with the space before it, for most byte-level BPE
vocabularies, the demo model's among them. What a server counted is in its usage.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

_TEXT = """
time people year work way day world life hand part place case week company system
program question government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head
house service friend father power hour game line end member law car city community
name president team minute idea body information back parent face others level
office door health person art war history party result change morning reason
research girl guy moment air teacher force education foot boy age policy music
market sense nation plan college interest death experience effect use class control
care field development role effort rate heart drug show leader light voice wife
police mind price report decision son view town road arm difference value building
action season society tax director position player record paper space ground form
event matter center couple project activity star table need court oil situation
cost industry figure street image phone data picture practice piece land product
doctor wall news test movie north love step model population fire future patient
sound rock site hope risk animal bank science window sea summer river energy color
stone winter tree garden plant spring food fish horse bird sun moon earth island
mountain forest snow rain wind storm village bridge train ship machine engine
metal iron gold glass wood cotton paint sugar salt bread milk fruit seed grain corn
"""
WORDS = tuple(_TEXT.split())


class Kind(IntEnum):
    """Whose text a piece is: pieces of two kinds never are the same text."""

    OWN = 0
    PREFIX = 1
    TRACE = 2
    WARMUP = 3


@dataclass(frozen=True, slots=True)
class Piece:
    """So many words; equal kinds and keys mean equal words, as far as both go."""

    kind: Kind
    key: int
    words: int


def text_of(pieces: Iterable[Piece], seed: int) -> str:
    """The pieces, one after the other; equal arguments mean equal text."""
    return " ".join(word for piece in pieces for word in _words(piece, seed))


def _words(piece: Piece, seed: int) -> list[str]:
    draw = np.random.default_rng((seed, int(piece.kind), piece.key))
    return [WORDS[at] for at in draw.integers(0, len(WORDS), piece.words)]
