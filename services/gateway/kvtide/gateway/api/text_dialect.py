"""``text_completion``, whole or in chunks."""

from collections.abc import Sequence

from kvtide.gateway.api import openai_encoding as openai
from kvtide.gateway.api.answers import Answers, Choice, Said
from kvtide.gateway.api.dialect import UNSET, Frame
from kvtide.gateway.api.problems import ApiError
from kvtide.gateway.api.replies import TextChoice, TextLogprobs
from kvtide.gateway.api.token_report import ReportedToken
from kvtide.gateway.life import Emit
from kvtide.gateway.reading import BlockKind

KIND = "text_completion"


class TextDialect:
    """See ``Dialect``. ``echoed``: the text in front of each answer, if asked for."""

    def __init__(self, frame: Frame, echoed: Sequence[str] = ()) -> None:
        """Share ``frame`` in all pieces."""
        self.frame = frame
        self._echoed = echoed

    def opening(self, answers: Answers) -> bytes:
        """See ``Dialect.opening``: the prompts, if they are echoed."""
        return b"".join(
            openai.chunk(self.frame, KIND, [TextChoice(choice.index, text, None)])
            for choice in answers.choices
            if (text := self._echo(choice))
        )

    def piece(self, said: Said) -> bytes:
        """See ``Dialect.piece``."""
        emit = said.command
        if not isinstance(emit, Emit):
            return b""
        shows = self.frame.show_ids or self.frame.show_logprobs
        if not emit.text and not (emit.ids and shows):
            return b""
        choice, end = said.choice, emit.index + len(emit.ids)
        piece = TextChoice(
            choice.index,
            emit.text,
            None,
            logprobs=_logprobs(self.frame.tokens(choice, emit.index, end)),
            token_ids=list(emit.ids) if self.frame.show_ids else UNSET,
        )
        return openai.chunk(self.frame, KIND, [piece])

    def ending(self, choice: Choice) -> bytes:
        """See ``Dialect.ending``: the one finish reason."""
        insight = self.frame.insight(choice)
        ending = TextChoice(choice.index, "", choice.reason, kvtide=insight)
        return openai.chunk(self.frame, KIND, [ending])

    def closing(self, answers: Answers) -> bytes:
        """See ``Dialect.closing``."""
        return openai.closing(self.frame, KIND, answers)

    def failure(self, error: ApiError) -> bytes:
        """See ``Dialect.failure``."""
        return openai.failure(error)

    def whole(self, answers: Answers) -> bytes:
        """See ``Dialect.whole``."""
        show = self.frame.show_ids
        choices = [
            TextChoice(
                choice.index,
                self._echo(choice) + choice.blocks.text_of(BlockKind.CONTENT),
                choice.reason,
                logprobs=_logprobs(self.frame.tokens(choice, 0, len(choice.ids))),
                token_ids=choice.ids if show else UNSET,
                prompt_token_ids=prompt if show else UNSET,
                kvtide=self.frame.insight(choice),
            )
            for choice, prompt in zip(answers.choices, answers.prompt_ids, strict=True)
        ]
        return openai.whole_body(self.frame, KIND, choices, openai.usage_of(answers))

    def _echo(self, choice: Choice) -> str:
        return self._echoed[choice.index] if self._echoed else ""


def _logprobs(tokens: Sequence[ReportedToken] | None) -> TextLogprobs | None:
    if not tokens:
        return None
    return TextLogprobs(
        [one.offset for one in tokens],
        [one.token.logprob for one in tokens],
        [one.token.text for one in tokens],
        # the token itself is among them, whatever its rank
        [{t.text: t.logprob for t in (one.token, *one.top)} for one in tokens],
    )
