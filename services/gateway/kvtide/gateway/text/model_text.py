"""One model's text: its tokenizer and chat template, read from its folder."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from kvtide.gateway.errors import ModelTextError, PromptError
from kvtide.gateway.reading import (
    CALL_START,
    THINK_END,
    THINK_START,
    CallFormat,
    Thinking,
)
from kvtide.gateway.reading.llama import PYTHON_TAG
from kvtide.gateway.text.answer_text import AnswerText
from kvtide.gateway.text.chat import ChatMessage, ChatTemplate
from kvtide.gateway.text.control_tokens import ControlTokens, Piece
from kvtide.gateway.text.token_bytes import TokenBytes
from kvtide.gateway.text.tokenizer_json import (
    TokenizerConfig,
    TokenizerFile,
    without_added,
)
from kvtide.gateway.text.tool_prompt import spelled_out

_PROBE = "a"
_OPEN_END = "\ufdef"
"""A noncharacter: where a message that is to be continued ends."""
_TAIL_TOKENS = 8
"""Enough to see a tag at the end of a prompt, however it is spelled."""


class ModelText:
    """Text to tokens and back for one model. Thread-safe; its calls block.

    Tokens that steer the model come from its template alone: in a prompt or a message
    they are text. A prompt begins with exactly one BOS if the model wants one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: TokenizerConfig,
        wall_s: Callable[[], float],
    ) -> None:
        """Take a tokenizer as it was read; its padding and truncation are off.

        Raises:
            ModelTextError: the decoder or the template can't be used.
        """
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.table = TokenBytes(tokenizer)
        self._template = (
            ChatTemplate(config.template, config.special, wall_s)
            if config.template is not None
            else None
        )
        serialised = tokenizer.to_str()
        added = TokenizerFile.parse(serialised).added_tokens
        self._added = frozenset(token.content for token in added)
        self._source = source = config.template or ""
        self._controls = ControlTokens(
            (token.content for token in added if token.special),
            (token.content for token in added if token.content in source),
        )
        self._control_ids = frozenset(
            token.id for token in added if token.content in self._controls.all
        )
        self._plain = Tokenizer.from_str(without_added(serialised, self._controls.all))
        self._bos = self._find_bos(config)
        self._newline = self._encode("\n")
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self.longest_token_chars = max(map(len, vocab))

    @classmethod
    def read(cls, folder: Path, wall_s: Callable[[], float]) -> Self:
        """Read ``tokenizer.json`` and what is beside it.

        Raises:
            ModelTextError: the folder has no usable tokenizer; the message says why.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelTextError(f"the model's folder {folder} has no tokenizer.json")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelTextError(f"{path} can't be read: {error}") from error
        return cls(tokenizer, TokenizerConfig.read(folder), wall_s)

    @property
    def has_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    @property
    def vocab_size(self) -> int:
        """Ids from this number on are no tokens."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a raw prompt, all of it text."""
        ids = self._encode_typed(text)
        return [*self._bos, *ids] if add_special_tokens else ids

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[ChatMessage] = (),
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """The ids of a chat; ``continue_final``: the last message is left open.

        Raises:
            PromptError: the model has no template, or its template refuses these.
        """
        if self._template is None:
            raise PromptError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        pictures = any(_has_pictures(message) for message in messages)
        if pictures and not self._template.takes_pictures:
            raise PromptError(
                "the model's chat template has no place for pictures: send text alone",
                param="messages",
            )
        if not self._template.takes_tools:
            messages, tools = spelled_out(messages, tools), ()
        if continue_final:
            messages = [*messages[:-1], _left_open(messages[-1])]
        # tools are the client's words too
        chat = [*messages, {"tools": list(tools)}]
        marked = self._controls.mark(chat)
        *messages, told = marked.messages if marked is not None else chat
        rendered = self._template.render(
            messages,
            tools=told["tools"],
            add_generation_prompt=add_generation_prompt and not continue_final,
            variables=variables,
        )
        if continue_final:
            rendered = _cut_open(rendered)
        if marked is None:
            ids = self._encode(rendered)
        else:
            ids = self._encode_pieces(marked.split(rendered))
        return self._with_one_bos(ids)

    @property
    def call_format(self) -> CallFormat:
        """How the model writes calls of tools, as its template shows it."""
        source = self._source
        bare = CALL_START not in source and '"parameters": ' in source
        return CallFormat.LLAMA if bare or PYTHON_TAG in source else CallFormat.HERMES

    def thinking_after(self, prompt: Sequence[int]) -> Thinking | None:
        """How an answer to ``prompt`` thinks; None for a template that marks no such."""
        if THINK_END not in self._source:
            return None
        end = self.decode(prompt[-_TAIL_TOKENS:]).rstrip()
        return Thinking(begun=end.endswith(THINK_START))

    def is_token(self, tag: str) -> bool:
        """Whether ``tag`` is one added token."""
        return tag in self._added

    def decode(self, ids: Sequence[int]) -> str:
        """All of ``ids`` as text, special tokens by name."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_name(self, token: int) -> str | None:
        """The vocabulary's entry, None for an unknown id."""
        return self._tokenizer.id_to_token(token)

    def answer(self, stops: Sequence[str], *, min_tokens: int = 0) -> AnswerText:
        """The text of one answer that is about to begin."""
        return AnswerText(self.table, stops, min_tokens=min_tokens)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _encode_typed(self, text: str) -> list[int]:
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if self._control_ids.isdisjoint(ids):
            return ids
        # the plain vocabulary itself makes a control token of this text
        raise PromptError(
            "the prompt can't be told from control tokens", param="prompt"
        )

    def _encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        ids: list[int] = []
        for i, piece in enumerate(pieces):
            ids += self._encode_piece(piece, first=i == 0)
        return ids

    def _encode_piece(self, piece: Piece, *, first: bool) -> list[int]:
        encode = self._encode_typed if piece.typed else self._encode
        if first:
            return encode(piece.text)
        # behind a newline, so that no space is put before what begins no text
        ids = encode("\n" + piece.text)
        size = len(self._newline)
        return ids[size:] if ids[:size] == self._newline else encode(piece.text)

    def _find_bos(self, config: TokenizerConfig) -> list[int]:
        """The tokens that the tokenizer puts before a text."""
        bare = self._encode(_PROBE)
        full = self._tokenizer.encode(_PROBE, add_special_tokens=True).ids
        text = config.special.get("bos_token")
        named = self._tokenizer.token_to_id(text) if text is not None else None
        if config.add_bos is False:
            return []
        if config.add_bos is True and named is not None:
            return [named]
        start = next(
            (i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0
        )
        return full[:start]

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        if not self._bos:
            return ids
        size = len(self._bos)
        while ids[size : 2 * size] == self._bos and ids[:size] == self._bos:
            ids = ids[size:]
        return ids if ids[:size] == self._bos else [*self._bos, *ids]


def _has_pictures(message: ChatMessage) -> bool:
    return isinstance(message.get("content"), list)


def _left_open(message: ChatMessage) -> dict[str, Any]:
    content = str(message.get("content") or "").replace(_OPEN_END, "")
    return {**message, "content": content + _OPEN_END}


def _cut_open(rendered: str) -> str:
    before, mark, _ = rendered.rpartition(_OPEN_END)
    if not mark:
        raise PromptError(
            "the model's chat template can't leave the last message open",
            param="messages",
        )
    return before
