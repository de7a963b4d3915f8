"""The tokenizer that a GGUF file describes, as transformers would write it."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Callable, Mapping

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from kvtide.engine.errors import BrokenModel, UnsupportedModel
from kvtide.engine.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4
_ROLES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "padding": "pad_token",
    "unknown": "unk_token",
}

# the splitting of Llama 3 and of Qwen 2, which differ in how digits are grouped
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PreTokenizer = pre_tokenizers.PreTokenizer


def _split(digits: str) -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS % digits), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _plain() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _single_digits() -> PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _plain()])


_SPLITTERS: Mapping[str, Callable[[], PreTokenizer]] = {
    "gpt-2": _plain,
    "smollm": _single_digits,
    "llama-bpe": lambda: _split(r"\p{N}{1,3}"),
    "qwen2": lambda: _split(r"\p{N}"),
}


def tokenizer_of(file: GgufFile) -> Tokenizer:
    """The file's tokenizer.

    Byte-level BPE is built here, since how text is split is named by
    `tokenizer.ggml.pre`, which transformers doesn't look at; SentencePiece is
    transformers' affair.

    Raises:
        UnsupportedModel: a kind of tokenizer that is not known.
        BrokenModel: what describes it is missing or damaged.
    """
    kind = file["tokenizer.ggml.model"]
    if kind == "gpt2":
        return _byte_level(file)
    if kind == "llama":
        return _by_transformers(file)
    raise UnsupportedModel(str(file.path), f"its tokenizer is of the kind {kind!r}")


def tokenizer_config(file: GgufFile) -> dict[str, object]:
    """What `tokenizer_config.json` would hold: special tokens and the chat template."""
    tokens: list[str] = file["tokenizer.ggml.tokens"]
    config: dict[str, object] = {
        # takes tokenizer.json as it is; model classes rebuild parts of it
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for role, name in _ROLES.items():
        token = file.find(f"tokenizer.ggml.{role}_token_id")
        if token is not None and 0 <= token < len(tokens):
            config[name] = tokens[token]
    template = file.find("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    add_bos = file.find("tokenizer.ggml.add_bos_token")
    if add_bos is None and file.find("tokenizer.ggml.pre") == "llama-bpe":
        add_bos = True
    if add_bos is not None:
        config["add_bos_token"] = bool(add_bos)
    return config


def _byte_level(file: GgufFile) -> Tokenizer:
    pre = file.find("tokenizer.ggml.pre")
    if pre not in _SPLITTERS:
        raise UnsupportedModel(
            str(file.path),
            f"its tokenizer splits text by the rules {pre!r}; known are"
            f" {', '.join(_SPLITTERS)}",
        )
    tokens: list[str] = file["tokenizer.ggml.tokens"]
    merges: list[str] = file["tokenizer.ggml.merges"]
    kinds: list[int] = file["tokenizer.ggml.token_type"]
    parts = [merge.partition(" ") for merge in merges]
    pairs = [(left, right) for left, _, right in parts]
    if len(kinds) != len(tokens) or not all(right for _, right in pairs):
        raise BrokenModel(file.path, "its tokenizer's lists don't fit together")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        bpe = models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises bare Exception
        reason = f"its tokenizer can't be built ({error})"
        raise BrokenModel(file.path, reason) from error
    tokenizer = Tokenizer(bpe)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _SPLITTERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in {_CONTROL, _USER_DEFINED}
        ]
    )
    return tokenizer


def _by_transformers(file: GgufFile) -> Tokenizer:
    # seconds to import, and needed for this kind alone
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        made = AutoTokenizer.from_pretrained(
            str(file.path.parent), gguf_file=file.path.name
        )
    except Exception as error:  # whatever a strange file makes it raise
        reason = f"transformers can't make its tokenizer ({error})"
        raise UnsupportedModel(str(file.path), reason) from error
    return made.backend_tokenizer
