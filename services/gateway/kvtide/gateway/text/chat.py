"""Chat templates, rendered in jinja2's sandbox as the models' authors expect."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvtide.gateway.errors import ModelTextError, PromptError

ChatMessage = Mapping[str, Any]
"""A message as a template sees it: ``role``, ``content`` and whatever else it has."""


@dataclass(frozen=True, slots=True)
class Chat:
    """What a chat template is given. ``param`` is the field that the messages came in.

    ``continue_final``: the answer goes on with the last message. ``pictures`` are files, in
    the order of the ``picture_part``s in the messages, each of which stands for one.
    """

    messages: Sequence[ChatMessage]
    param: str = "messages"
    tools: Sequence[ChatMessage] = ()
    variables: Mapping[str, object] = field(default_factory=dict[str, object])
    add_generation_prompt: bool = True
    continue_final: bool = False
    pictures: tuple[bytes, ...] = ()


_PROBE = "Probe 7 of the template"


class ChatTemplate:
    """One model's template. Rendering neither reads files nor runs foreign Python."""

    def __init__(
        self,
        source: str,
        special: Mapping[str, str],
        wall_s: Callable[[], float],
    ) -> None:
        """Compile ``source``; ``special`` are the tokens that it may name.

        Raises:
            ModelTextError: it does not compile.
        """
        self.source = source
        self._special = dict(special)
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
        )
        env.filters["tojson"] = _tojson

        def strftime_now(form: str) -> str:
            return datetime.fromtimestamp(wall_s(), UTC).strftime(form)

        names: dict[str, Any] = env.globals  # typed too narrowly by jinja2
        names.update(raise_exception=_raise_exception, strftime_now=strftime_now)
        try:
            self._template = env.from_string(source)
            named = meta.find_undeclared_variables(env.parse(source))
        except jinja2.TemplateError as error:
            raise ModelTextError(
                f"the chat template does not compile: {error}"
            ) from error
        self.takes_tools = "tools" in named or "tool_calls" in source
        self._wants_parts = False
        self._wants_parts = self._find_form()
        self.takes_pictures = self._sees_pictures()

    def _find_form(self) -> bool:
        """Whether it sees a message's text only as a list of parts.

        Such templates, of models that take pictures, write nothing for a plain string.
        """
        whole = [{"role": "user", "content": _PROBE}]
        return not self._shows(whole) and self._shows(_in_parts(whole))

    def _sees_pictures(self) -> bool:
        """Whether it writes something for a picture beside a text."""
        text, both = (
            self._shown([{"role": "user", "content": parts}])
            for parts in ([text_part(_PROBE)], [picture_part(), text_part(_PROBE)])
        )
        # one that knows no parts may write a list as Python does
        written = _PROBE in text and _PROBE in both and text != both
        return written and "'type'" not in both

    def _shows(self, messages: Sequence[ChatMessage]) -> bool:
        return _PROBE in self._shown(messages)

    def _shown(self, messages: Sequence[ChatMessage]) -> str:
        try:
            return self.render(messages)
        except PromptError:
            return ""

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
        tools: Sequence[ChatMessage] = (),
    ) -> str:
        """The chat as the model's text; templates take no tools as null.

        A content is text or parts; where the template wants parts, text is made one.

        Raises:
            PromptError: the template does not take these messages.
        """
        chat = _in_parts(messages) if self._wants_parts else messages
        try:
            return self._template.render(
                {
                    **self._special,
                    **(variables or {}),
                    "messages": chat,
                    "tools": list(tools) or None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except jinja2.TemplateError as error:
            raise PromptError(
                f"the model's chat template refuses these messages: {error}",
                param="messages",
            ) from error
        except Exception as error:  # a template is foreign code: anything may come
            raise PromptError(
                f"the model's chat template can't render these messages: {error}",
                param="messages",
            ) from error


def picture_part() -> dict[str, Any]:
    """A part of a message that templates write a picture's token for."""
    return {"type": "image"}


def text_part(text: str) -> dict[str, Any]:
    """A part of a message that is text."""
    return {"type": "text", "text": text}


def _in_parts(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    return [
        {**message, "content": [text_part(content)]}
        if isinstance(content := message.get("content"), str)
        else message
        for message in messages
    ]


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which is not what models were trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _GenerationTag(Extension):
    """``{% generation %}`` marks what the model wrote; for us it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - typed so by jinja2

    def parse(self, parser: Parser) -> list[Node]:
        """The statements up to ``endgeneration``."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
