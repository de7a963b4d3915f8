"""What was said in a conversation so far, as each of OpenAI's two APIs wants it."""

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec


class Api(StrEnum):
    """Which of OpenAI's APIs is asked."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        """Below the server's URL."""
        return "/v1/chat/completions" if self is Api.CHAT else "/v1/completions"


@dataclass(slots=True)
class Dialogue:
    """Grows by a question and an answer in turn."""

    said: list[str] = field(default_factory=list[str])

    def say(self, text: str) -> None:
        """Whoever's turn it is says this."""
        self.said.append(text)

    def body(self, api: Api, style: "Style", output_tokens: int) -> bytes:
        """A request for the next answer, as JSON.

        ``ignore_eos`` is an extension that kvtide and vLLM share.
        """
        asked: dict[str, object] = {
            "model": style.model,
            "max_tokens": output_tokens,
            "temperature": style.temperature,
            "seed": style.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if style.ignore_eos:
            asked["ignore_eos"] = True
        if api is Api.CHAT:
            roles = ("user", "assistant")
            asked["messages"] = [
                {"role": roles[at % 2], "content": text}
                for at, text in enumerate(self.said)
            ]
        else:
            asked["prompt"] = self._text()
        return msgspec.json.encode(asked)

    def _text(self) -> str:
        """An answer goes on where its question ended, with a space of its own."""
        return "".join(
            f" {text}" if at and at % 2 == 0 else text
            for at, text in enumerate(self.said)
        )


@dataclass(frozen=True, slots=True)
class Style:
    """What all requests of a load have in common."""

    model: str
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = True
