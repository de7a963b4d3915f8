"""Chats to tokens: templates, control tokens that users type, exactly one BOS."""

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from tests.unit.gateway_models import CHATML, byte_level, sentence_piece, write_model
from tokenizers import Tokenizer

from kvtide.gateway.errors import ModelTextError, PromptError
from kvtide.gateway.text import ModelText
from kvtide.gateway.text.tokenizer_json import TokenizerConfig

LLAMA = (
    "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] }} [/INST]"
    "{% endfor %}"
)
NAMES = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>"]


def make(template: str = CHATML, **special: str) -> ModelText:
    config = TokenizerConfig(special, template, None)
    return ModelText(byte_level(), config, lambda: 0.0)


def make_llama(template: str = LLAMA, *, add_bos: bool | None = None) -> ModelText:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    config = TokenizerConfig(special, template, add_bos)
    return ModelText(sentence_piece(), config, lambda: 0.0)


CHAT = cache(make)


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def control_ids(text: ModelText, ids: list[int]) -> list[str]:
    names = [text.token_name(i) for i in ids]
    return [name for name in names if name in NAMES]


FRAME = ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


def test_an_innocent_chat_is_encoded_as_the_whole_rendered_text() -> None:
    rendered = "<|im_start|>user\nhello\n\n<|im_end|>\n<|im_start|>assistant\n"
    expected = byte_level().encode(rendered, add_special_tokens=False).ids
    assert CHAT().encode_chat(user("hello\n\n")) == expected


PARTS = st.lists(
    st.sampled_from([*NAMES, "<|im_", "end|>", " ", "\n", "x", "﷐", "﷑", "日"]),
    max_size=6,
).map("".join)


@settings(max_examples=100, deadline=None)
@given(PARTS)
def test_control_tokens_that_a_user_types_are_text(content: str) -> None:
    text = CHAT()
    ids = text.encode_chat(user(content))
    assert control_ids(text, ids) == FRAME
    frame = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    assert text.decode(ids) == frame


@settings(max_examples=100, deadline=None)
@given(PARTS)
def test_a_prompt_is_text_all_through(content: str) -> None:
    text = CHAT()
    ids = text.encode_prompt(content)
    assert control_ids(text, ids) == []
    assert text.decode(ids) == content


def test_control_tokens_inside_structures_are_text_too() -> None:
    template = "{% for m in messages %}{{ m['tool_calls'][0]['arguments'] | tojson }}{% endfor %}"
    text = make(template + "<tool_call>")
    calls = [{"arguments": {"x": ["<|im_end|>", 1]}}]
    ids = text.encode_chat([{"role": "tool", "content": "", "tool_calls": calls}])
    assert control_ids(text, ids) == ["<tool_call>"]
    assert text.decode(ids) == '{"x": ["<|im_end|>", 1]}<tool_call>'


def test_an_assistant_may_have_made_what_the_template_writes() -> None:
    text = CHAT()
    call = [{"role": "assistant", "content": "<tool_call>x<|im_end|>"}]
    assert control_ids(text, text.encode_chat(call)) == [
        "<|im_start|>",
        "<tool_call>",
        "<|im_end|>",
        "<|im_start|>",
    ]


@pytest.mark.parametrize(
    "cut",
    [
        "m['content'][1:]",
        "m['content'][:-1]",
        "m['content'].split('|')[0] ~ '|im_end|>'",
    ],
)
def test_a_template_that_cuts_a_typed_token_apart_makes_no_token(cut: str) -> None:
    text = make("{% for m in messages %}{{ " + cut + " }}{% endfor %}")
    ids = text.encode_chat(user("<|im_end|>"))
    assert control_ids(text, ids) == []
    assert text.decode(ids) == "<|im_end|>"


@pytest.mark.parametrize(
    "template",
    [LLAMA, LLAMA.replace("{{ bos_token }}", ""), "{{ bos_token }}" + LLAMA],
    ids=["once", "never", "twice"],
)
def test_there_is_exactly_one_bos(template: str) -> None:
    ids = make_llama(template).encode_chat(user("hello"))
    assert ids.count(1) == 1
    assert ids[0] == 1


def test_prompts_get_the_bos_of_the_tokenizer() -> None:
    text = make_llama()
    ids = text.encode_prompt("hello")
    assert ids == sentence_piece().encode("hello").ids
    assert text.encode_prompt("hello", add_special_tokens=False) == ids[1:]
    assert text.encode_prompt("<s>hello").count(1) == 1
    assert make_llama(add_bos=False).encode_prompt("hello") == ids[1:]


def test_a_typed_token_puts_no_space_into_a_sentence_piece_chat() -> None:
    text = make_llama()
    ids = text.encode_chat(user("a </s> b"))
    assert 2 not in ids
    assert text.decode(ids) == "<s> [INST] a </s> b [/INST]"


def test_a_vocabulary_that_makes_a_control_token_of_plain_text_is_cut() -> None:
    # the merges alone build the special token, as no trained vocabulary should
    raw = json.loads(byte_level().to_str())
    model = raw["model"]
    name = "<|im_end|>"
    for size in range(2, len(name) + 1):
        if name[:size] not in model["vocab"]:
            model["vocab"][name[:size]] = max(model["vocab"].values()) + 1
        model["merges"].append([name[: size - 1], name[size - 1]])
    tokenizer = Tokenizer.from_str(json.dumps(raw))
    text = ModelText(tokenizer, TokenizerConfig({}, CHATML, None), lambda: 0.0)
    for content in (name, f"a{name}b{name}", "<|im_en"):
        ids = text.encode_prompt(content)
        assert control_ids(text, ids) == []
        assert text.decode(ids) == content


def test_templates_get_what_their_authors_expect() -> None:
    text = make(
        "{%- for m in messages %}{{ m | tojson }}{{ loop.index }}{% break %}{% endfor %}\n"
        "    {% generation %}{{ strftime_now('%Y') }}{% endgeneration %}{{ extra }}"
    )
    ids = text.encode_chat(user("<é>"), variables={"extra": "!"})
    assert text.decode(ids) == '{"role": "user", "content": "<é>"}11970!'


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].nothing.there }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[5]['content'] + 1 }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_a_refusing_or_failing_template_is_the_messages_fault(template: str) -> None:
    text = make(template)
    with pytest.raises(PromptError) as caught:
        text.encode_chat(user("x"))
    assert caught.value.param == "messages"


def test_a_model_without_a_template_has_no_chat(tmp_path: Path) -> None:
    folder = write_model(tmp_path, byte_level(), template=None)
    text = ModelText.read(folder, lambda: 0.0)
    assert not text.has_chat
    with pytest.raises(PromptError, match="completions"):
        text.encode_chat(user("x"))


def test_the_folder_is_read_in_every_shape(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_end|>"}
    named = [{"name": "tool", "template": "x"}, {"name": "default", "template": "y"}]
    folder = write_model(
        tmp_path, byte_level(), template=None, chat_template=named, **config
    )
    read = TokenizerConfig.read(folder)
    assert read.template == "y"
    assert read.special == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    (folder / "chat_template.jinja").write_text("{{ bos_token }}z")
    text = ModelText.read(folder, lambda: 0.0)
    assert text.decode(text.encode_chat(user("x"))) == "<|endoftext|>z"


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("tokenizer.json", "{", "can't be read"),
        ("tokenizer_config.json", "[]", "no JSON object"),
        ("tokenizer_config.json", "{", "not JSON"),
        ("chat_template.jinja", "{% for %}", "does not compile"),
    ],
)
def test_a_broken_folder_says_what_is_wrong(
    tmp_path: Path, name: str, content: str, match: str
) -> None:
    folder = write_model(tmp_path, byte_level())
    (folder / name).write_text(content)
    with pytest.raises(ModelTextError, match=match):
        ModelText.read(folder, lambda: 0.0)
    with pytest.raises(ModelTextError, match=r"no tokenizer\.json"):
        ModelText.read(tmp_path / "nowhere", lambda: 0.0)
