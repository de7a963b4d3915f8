"""Pictures through the gateway to a model that sees them, beside what vLLM alone says."""

import base64
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integration.cluster import Cluster, wait_for
from tests.unit.picture_files import claiming, data_url, png
from tests.vllm.vllm_engine import (
    PYTHON,
    Generated,
    options,
    vllm_engine,
    vllm_environment,
)
from tests.vllm.vllm_models import picture_model
from tests.vllm.vllm_workers import post, runs, serving

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON, reason="make test-vllm names vLLM's Python"),
]

RED, BLUE, GREEN = (220, 30, 20), (20, 40, 210), (20, 200, 60)
PICTURES = {"warm": png([RED, GREEN]), "cold": png([BLUE, GREEN, BLUE])}
QUESTION = "What do you see in this picture?"
NEW_TOKENS = 12
BLOCK_TOKENS = 128
ASKS = 8


@dataclass(frozen=True)
class Told:
    """One answer of the gateway, or its refusal."""

    status: int
    ids: list[int]
    prompt_tokens: int
    cached: int
    error: str


def rendered(*, picture: bool) -> str:
    """What the model's template makes of the question."""
    place = "<image>\n" if picture else ""
    return f"<|im_start|>user\n{place}{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def ask(cluster: Cluster, *urls: str, **more: object) -> Told:
    """The question, behind these pictures."""
    content: list[Any] = [*map(part, urls), {"type": "text", "text": QUESTION}]
    body: Mapping[str, object] = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }
    said = post(cluster, body, "/v1/chat/completions")
    if "error" in said:
        return Told(said["status"], [], 0, 0, said["error"]["message"])
    usage = said["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    ids = said["choices"][0]["token_ids"]
    return Told(200, ids, usage["prompt_tokens"], cached, "")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return picture_model(tmp_path_factory.mktemp("seeing") / "model", model)


@pytest.fixture(scope="module")
def right(folder: Path, seeing: Path) -> dict[str, Generated]:
    """What vLLM alone says of each picture, and of none."""
    with vllm_engine(options(seeing, None), folder / "seeing.log") as engine:
        made = {
            name: engine.generate([rendered(picture=True)], NEW_TOKENS, picture=data)
            for name, data in PICTURES.items()
        }
        made["none"] = engine.generate([rendered(picture=False)], NEW_TOKENS)
    assert len({tuple(one.tokens[0]) for one in made.values()}) == len(made)
    return made


def sees(cluster: Cluster, name: str, right: Mapping[str, Generated]) -> Told:
    """The gateway's answer is vLLM's, and counts what vLLM counted."""
    urls = [data_url(PICTURES[name])] if name in PICTURES else []
    told = ask(cluster, *urls)
    assert told.status == 200, told
    assert told.ids == right[name].tokens[0]
    assert told.prompt_tokens == right[name].prompt_tokens[0]
    return told


def reuses(cluster: Cluster, name: str, right: Mapping[str, Generated]) -> None:
    """Asked again, blocks of the same picture are reused.

    More than once, since a busy machine may have dropped a save.
    """
    cached = [sees(cluster, name, right).cached for _ in range(ASKS)]
    assert max(cached) >= BLOCK_TOKENS, cached


def test_a_model_sees_pictures(
    tmp_path: Path, seeing: Path, right: dict[str, Generated]
) -> None:
    with serving(tmp_path, seeing, ["prefill,decode"]) as cluster:
        for name in right:
            assert sees(cluster, name, right).cached < BLOCK_TOKENS
        reuses(cluster, "warm", right)
        told_alike(cluster, PICTURES["warm"])
        refusals(cluster)
        reuses(cluster, "cold", right)
        wait_for(lambda: not runs(cluster, "vllm-0"), "nothing runs at vLLM", 60.0)
        # what another life of the engine reuses came from the pool
        cluster.kill("vllm-0")
        cluster["vllm-0"].start(vllm_environment())
        cluster.wait_ready(900.0)
        for name in ("warm", "cold"):
            reuses(cluster, name, right)


def told_alike(cluster: Cluster, picture: bytes) -> None:
    """Anthropic's messages and OpenAI's responses take the same picture as a chat."""
    url = data_url(picture)
    few: Mapping[str, object] = {"temperature": 0, "max_tokens": NEW_TOKENS}
    text = {"type": "text", "text": QUESTION}
    asked = [{"role": "user", "content": [part(url), text]}]
    chat = post(cluster, {"messages": asked, **few}, "/v1/chat/completions")
    source = {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(picture).decode(),
    }
    asked = [{"role": "user", "content": [{"type": "image", "source": source}, text]}]
    message = post(cluster, {"messages": asked, **few}, "/v1/messages")
    content = [
        {"type": "input_image", "image_url": url},
        {"type": "input_text", "text": QUESTION},
    ]
    body = {
        "input": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_output_tokens": NEW_TOKENS,
    }
    response = post(cluster, body, "/v1/responses")
    said = chat["choices"][0]["message"]["content"]
    assert said
    assert message["content"][0]["text"] == said
    assert response["output"][0]["content"][0]["text"] == said


def damaged(picture: bytes) -> bytes:
    """Whole by its chunks, but what is packed in them is not."""
    packed = picture.index(b"IDAT") + 4
    return picture[:packed] + bytes(8) + picture[packed + 8 :]


def refusals(cluster: Cluster) -> None:
    """What is no picture, or too much of one, is refused, and the worker lives on."""
    whole = PICTURES["warm"]
    for url, said in (
        ("http://127.0.0.1:1/x.png", "send the picture itself"),
        ("file:///etc/passwd", "send the picture itself"),
        (data_url(whole[:-20]), "cut short"),
        (data_url(b"GIF89a" + bytes(100)), "no PNG, JPEG or WebP"),
        (data_url(claiming(60_000, 60_000)), "pixels"),
        (data_url(bytes(5 << 20)), "bytes"),
        (data_url(damaged(whole)), "can't be opened"),
    ):
        told = ask(cluster, url)
        assert told.status in (400, 413), told
        assert said in told.error, told
    many = ask(cluster, *[data_url(whole)] * 9)
    assert many.status == 400
    assert "at most 8" in many.error


OPENS = """
import base64, json, sys
from kvtide.connect.vllm_worker.pictures import opened
for packed in json.load(sys.stdin):
    try:
        print("size", *opened(base64.b64decode(packed), 10_000).size)
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_a_worker_opens_no_other_picture_than_a_gateway_sends_on() -> None:
    """It reads heads by itself: a gateway may be another's, or have other bounds."""
    whole = PICTURES["warm"]
    given = [whole, damaged(whole), whole[:60], b"GIF89a" + bytes(50)]
    given += [claiming(60_000, 60_000), claiming(101, 100)]
    done = subprocess.run(  # noqa: S603 - our own arguments
        [PYTHON, "-c", OPENS],
        input=json.dumps([base64.b64encode(data).decode() for data in given]),
        env=vllm_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    told = done.stdout.splitlines()[-len(given) :]
    assert told[0] == "size 96 96"
    said = ("broken", "truncated", "no PNG, JPEG or WebP", "bomb", "101 x 100 pixels")
    for line, what in zip(told[1:], said, strict=True):
        assert line.startswith("UnsupportedOption")
        assert what in line


def test_pictures_are_computed_by_decode_alone(
    tmp_path: Path, seeing: Path, right: dict[str, Generated]
) -> None:
    with serving(tmp_path, seeing, ["prefill", "decode"]) as cluster:
        for name in right:
            sees(cluster, name, right)
        reuses(cluster, "warm", right)
