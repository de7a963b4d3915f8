"""Pictures at the gateway: taken within bounds, given to the template, sent whole."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from tests.unit.gateway_models import CHATML, SEEING, byte_level
from tests.unit.gateway_story import D1, D2, P1, PROMPT, SPACE, R, Story, make_spec
from tests.unit.picture_files import JPEG, WEBPS, claiming, data_url, png

from kvtide.bus.messages import DecodeWork, FinishReason, PictureWork, Tokens
from kvtide.engine.picture_heads import BadPictureError, size_of
from kvtide.gateway.api.messages import template_messages
from kvtide.gateway.api.pictures import PictureLimits, PictureTray, check_sent
from kvtide.gateway.api.problems import ApiError
from kvtide.gateway.api.schemas import Message
from kvtide.gateway.errors import PromptError
from kvtide.gateway.life import (
    Finish,
    NodeGone,
    Quarantine,
    SendAdmit,
    SendDecodeWork,
    SendPrefillWork,
    Submitted,
    Usage,
    WorkerSaid,
)
from kvtide.gateway.text import ModelText
from kvtide.gateway.text.chat import picture_part, text_part
from kvtide.gateway.text.tokenizer_json import TokenizerConfig

RED, BLUE = png([(200, 0, 0)], side=8), png([(0, 0, 200)], side=8)
LIMITS = PictureLimits(most=2, bytes_each=2000, bytes_all=3000, pixels=100)


@pytest.mark.parametrize("data", [JPEG, *WEBPS.values()], ids=["jpeg", *WEBPS])
def test_sizes_are_read_from_heads(data: bytes) -> None:
    assert size_of(data) == (30, 20)
    for end in range(len(data)):
        with pytest.raises(BadPictureError):
            size_of(data[:end])


def test_a_png_is_whole_or_refused() -> None:
    assert size_of(RED) == (8, 8)
    for end in range(len(RED)):
        with pytest.raises(BadPictureError):
            size_of(RED[:end])
    with pytest.raises(BadPictureError, match="no pixels"):
        size_of(claiming(0, 5))


def test_a_small_file_cannot_keep_anybody_busy() -> None:
    scan = b"\xff\xda\x00\x02"
    usual, many = (JPEG[:-2] + scan * count + JPEG[-2:] for count in (32, 33))
    assert size_of(usual) == (30, 20)
    with pytest.raises(BadPictureError, match="scans"):
        size_of(many)
    fill = JPEG[:2] + b"\xff" * 5000 + JPEG[2:]
    with pytest.raises(BadPictureError, match="parts"):
        size_of(fill)
    empty = RED[:-12] + (bytes(4) + b"tEXt" + bytes(4)) * 5000 + RED[-12:]
    with pytest.raises(BadPictureError, match="parts"):
        size_of(empty)


@given(
    st.sampled_from([RED, JPEG, *WEBPS.values()]), st.integers(0), st.integers(0, 255)
)
def test_damage_is_a_bad_picture_and_nothing_worse(
    data: bytes, place: int, value: int
) -> None:
    damaged = bytearray(data)
    damaged[place % len(data)] = value
    try:
        width, height = size_of(bytes(damaged))
    except BadPictureError:
        return
    assert width > 0
    assert height > 0


def refused(tray: PictureTray, url: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        tray.add(url, "messages[0].content[0].image_url")
    assert caught.value.param == "messages[0].content[0].image_url"
    return caught.value


def test_pictures_are_taken_in_order() -> None:
    tray = PictureTray(lambda: LIMITS)
    for data in (RED, BLUE):
        tray.add(data_url(data, "image/PNG"), "x")
    assert tray.pictures == (RED, BLUE)
    assert "at most 2 pictures" in str(refused(tray, data_url(RED)))


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/x.png",
        "https://example.org/;base64,",
        "file:///etc/passwd",
        "data:text/html;base64,eA==",
        "data:image/svg+xml;base64,eA==",
        "data:image/png,eA==",
        "shm://block;base64,eA==",
        "",
    ],
)
def test_what_is_no_picture_itself_is_refused_with_what_to_send(url: str) -> None:
    error = refused(PictureTray(lambda: LIMITS), url)
    assert error.status == 400
    assert "send the picture itself as a data URL" in str(error)


def test_sizes_are_looked_at_before_anything_is_decoded() -> None:
    # were it decoded, it would be found to be no base64
    packed = "data:image/png;base64," + "*" * 4000
    error = refused(PictureTray(lambda: LIMITS), packed)
    assert error.status == 413
    assert "2000 bytes" in str(error)
    tray = PictureTray(lambda: PictureLimits(9, 2000, len(RED) + 10, 100))
    tray.add(data_url(RED), "x")
    assert f"{len(RED) + 10} bytes" in str(refused(tray, data_url(RED)))
    with pytest.raises(ApiError, match="times 3 answers"):
        check_sent((RED, BLUE), 3, len(RED) * 5, "messages")
    check_sent((RED, BLUE), 2, len(RED) * 5, "messages")


def test_other_faults_are_told_apart() -> None:
    for data, said in (
        ("data:image/png;base64,eA", "base64"),
        (data_url(b"no picture"), "no PNG, JPEG or WebP"),
        (data_url(RED[:-5]), "cut short"),
        (data_url(claiming(1 << 16, 1 << 16)), "65536 x 65536 pixels"),
    ):
        error = refused(PictureTray(lambda: LIMITS), data)
        assert error.status == 400
        assert said in str(error)
    blind = PictureLimits(2, 2000, 3000, 100, refusal="none here")
    assert "none here" in str(refused(PictureTray(lambda: blind), data_url(RED)))


def message(role: str, *content: object) -> Message:
    return Message.model_validate({"role": role, "content": list(content)})


def test_only_a_content_with_pictures_stays_in_parts() -> None:
    tray = PictureTray(lambda: LIMITS)
    hello, bye = ({"type": "text", "text": text} for text in ("hello", "bye"))
    picture = {
        "type": "image_url",
        "image_url": {"url": data_url(RED), "detail": "low"},
    }
    told = template_messages(
        [message("user", hello, bye), message("user", hello, picture, bye)], tray
    )
    assert [one["content"] for one in told] == [
        "hello\nbye",
        [text_part("hello"), picture_part(), text_part("bye")],
    ]
    assert tray.pictures == (RED,)
    with pytest.raises(ApiError, match="only a user message"):
        template_messages([message("assistant", picture)], tray)


def text_of(template: str) -> ModelText:
    return ModelText(byte_level(), TokenizerConfig({}, template, None), lambda: 0.0)


def test_the_template_says_where_pictures_are() -> None:
    text = text_of(SEEING)
    parts = [text_part("hello <tool_call>"), picture_part(), text_part("hello")]
    ids = text.encode_chat([{"role": "user", "content": parts}])
    # what stands for a picture is the template's word: one that is typed is text
    names = [text.token_name(i) for i in ids]
    assert names.count("<tool_call>") == 1
    assert text.decode(ids).startswith("<|im_start|>user\nhello <tool_call><tool_call>")


def test_a_template_without_a_place_for_pictures_refuses_them() -> None:
    printed = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for template in (CHATML, printed):
        text = text_of(template)
        with pytest.raises(PromptError, match="no place for pictures"):
            text.encode_chat([{"role": "user", "content": [picture_part()]}])


def test_a_template_that_knows_parts_alone_gets_text_as_one() -> None:
    parts_alone = (
        "{% for m in messages %}{% for part in m.content %}{% if part.type == 'image' %}"
        "<tool_call>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    text = text_of(parts_alone)
    said = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "he"},
    ]
    for continued in (False, True):
        ids = text.encode_chat(said, continue_final=continued)
        assert text.decode(ids) == "hellohe"


def picture_story() -> Story:
    return Story(make_spec(keys=(), pictures=(RED, BLUE)))


def works(story: Story) -> list[DecodeWork]:
    return [c.message for c in story.said if isinstance(c, SendDecodeWork)]


def test_a_prompt_with_pictures_has_no_keys_and_goes_to_decode_alone() -> None:
    story = picture_story()
    story.tell(Submitted())
    story.place(prefill=P1)
    assert not [c for c in story.said if isinstance(c, SendPrefillWork)]
    (work,) = works(story)
    assert isinstance(work, PictureWork)
    assert work.pictures == (RED, BLUE)
    assert (work.keys, work.reuse, work.prefill) == ((), (), None)
    assert work.tokens == PROMPT


def test_a_failover_in_mid_answer_sends_the_pictures_again() -> None:
    story = picture_story()
    story.run(prefill=None)
    more = tuple(range(40, 60))
    story.tokens(0, more[:4])
    story.tell(NodeGone(D1))
    story.run(prefill=None, decode=D2)
    first, second = works(story)
    assert isinstance(second, PictureWork)
    assert second.pictures == (RED, BLUE)
    assert (first.tokens, second.tokens) == (PROMPT, (*PROMPT, *more[:4]))
    # nor are there keys for what tokens of the answer would fill
    admits = [c.message for c in story.said if isinstance(c, SendAdmit)]
    assert [admit.keys for admit in admits] == [(), ()]
    assert second.keys == ()


def test_usage_is_what_the_worker_counted() -> None:
    story = picture_story()
    story.run(prefill=None)
    said = Tokens(
        request=R,
        attempt=1,
        decode=D1,
        choice=0,
        index=0,
        ids=(7,),
        finish=FinishReason.LENGTH,
        reused_tokens=128,
        prompt_tokens=400,
    )
    story.tell(WorkerSaid(D1, said))
    (end,) = [c for c in story.said if isinstance(c, Finish)]
    assert end.usage == Usage(400, 1, 128)


def test_the_quarantine_tells_pictures_apart() -> None:
    quarantine = Quarantine(60.0)
    spec = make_spec(keys=(), pictures=(RED,))
    quarantine.add(spec, 10.0)
    assert quarantine.refuses(spec, 20.0)
    for pictures in ((), (BLUE,), (RED, RED)):
        assert not quarantine.refuses(replace(spec, pictures=pictures), 20.0)


def test_keys_of_an_answer_without_pictures_go_on() -> None:
    story = Story()
    story.run()
    story.tokens(0, range(40, 46))
    story.tell(NodeGone(D1))
    story.run(decode=D2)
    assert len(works(story)[1].keys) == len(SPACE.chain((*PROMPT, *range(40, 46))))
