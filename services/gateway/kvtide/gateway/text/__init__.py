"""Text to tokens and back: chat templates, tokenizer, streams, stop strings."""

from kvtide.gateway.text.answer_text import AnswerText
from kvtide.gateway.text.chat import ChatTemplate
from kvtide.gateway.text.detokenizer import Detokenizer
from kvtide.gateway.text.model_text import ModelText
from kvtide.gateway.text.stops import StopStrings
from kvtide.gateway.text.token_bytes import TokenBytes

__all__ = [
    "AnswerText",
    "ChatTemplate",
    "Detokenizer",
    "ModelText",
    "StopStrings",
    "TokenBytes",
]
