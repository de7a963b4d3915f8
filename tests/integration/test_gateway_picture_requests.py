"""Pictures over HTTP: to workers that see them, and refused for those that don't."""

import base64
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from tests.integration.gateway_cluster import MODEL, Running, running_gateway
from tests.integration.gateway_script import Script
from tests.unit.picture_files import data_url, png

from kvtide.bus.messages import AnyMessage, DecodeWork, Message, Outcome, PictureWork
from kvtide.runtime import LimitError

RED, BLUE = png([(200, 0, 0)], side=600), png([(0, 0, 200)], side=600)
ROUTE = "/v1/chat/completions"


@pytest.fixture
async def running(tmp_path: Path) -> AsyncGenerator[Running]:
    script = Script(pictures=True, prompt_tokens=300, reused=256)
    async with running_gateway(
        tmp_path, script=script, max_open_picture_bytes=2 * len(RED)
    ) as running:
        yield running


@pytest.fixture
async def http(running: Running) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url, timeout=20) as client:
        yield client


def chat(*urls: str, **more: object) -> dict[str, Any]:
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": url}} for url in urls
    ]
    content = [*parts, {"type": "text", "text": "hello"}]
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **more}


async def test_a_worker_gets_the_pictures_and_says_what_they_took(
    running: Running, http: httpx.AsyncClient
) -> None:
    response = await http.post(ROUTE, json=chat(data_url(RED), data_url(BLUE)))
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    assert usage["prompt_tokens"] == 300
    assert usage["prompt_tokens_details"]["cached_tokens"] == 256
    (work,) = running.cluster.decodes
    assert isinstance(work, PictureWork)
    assert work.pictures == (RED, BLUE)
    assert work.keys == ()
    assert not running.cluster.prefills
    (admit,) = running.cluster.admits
    assert admit.keys == ()


async def test_text_alone_is_work_as_ever(
    running: Running, http: httpx.AsyncClient
) -> None:
    assert (await http.post(ROUTE, json=chat())).status_code == 200
    (work,) = running.cluster.decodes
    assert type(work) is DecodeWork


def block(picture: bytes) -> dict[str, Any]:
    """A picture as Anthropic's API has it."""
    data = base64.b64encode(picture).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"type": "image", "source": source}


async def test_anthropics_clients_send_pictures(running: Running) -> None:
    text = {"type": "text", "text": "hello"}
    content: Any = [block(RED), text, block(BLUE)]
    async with anthropic.AsyncAnthropic(
        base_url=running.url, api_key="none", max_retries=0
    ) as client:
        said = await client.messages.create(
            model=MODEL,
            max_tokens=9,
            messages=[{"role": "user", "content": content}],
        )
    assert said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0) == 300
    (work,) = running.cluster.decodes
    assert isinstance(work, PictureWork)
    assert work.pictures == (RED, BLUE)


async def test_openais_responses_take_pictures(running: Running) -> None:
    content: Any = [
        {"type": "input_image", "image_url": data_url(RED), "detail": "auto"},
        {"type": "input_text", "text": "hello"},
    ]
    async with openai.AsyncOpenAI(
        base_url=f"{running.url}/v1", api_key="none", max_retries=0
    ) as client:
        said = await client.responses.create(
            model=MODEL, input=[{"role": "user", "content": content}]
        )
    assert said.usage is not None
    assert said.usage.input_tokens == 300
    (work,) = running.cluster.decodes
    assert isinstance(work, PictureWork)
    assert work.pictures == (RED,)


def message(role: str, *content: object) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}]}


def item(role: str, *content: object) -> dict[str, Any]:
    return {"input": [{"role": role, "content": list(content)}]}


FAR = "https://example.org/x.png"
IMAGE, INPUT = block(RED), {"type": "input_image", "image_url": data_url(RED)}
RESULT = {"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}
OUTPUT = {"type": "function_call_output", "call_id": "x", "output": [INPUT]}


@pytest.mark.parametrize(
    ("route", "asked", "param", "said"),
    [
        (
            "/v1/messages",
            message("user", {"type": "image", "source": {"type": "url", "url": FAR}}),
            "messages[0].content[0].source",
            '"type": "base64"',
        ),
        (
            "/v1/messages",
            message(
                "user",
                {"type": "image", "source": {**IMAGE["source"], "media_type": "x/y"}},
            ),
            "messages[0].content[0].source",
            "PNG, JPEG or WebP",
        ),
        (
            "/v1/messages",
            message("user", {"type": "image", "source": {"type": "base64"}}),
            "messages[0].content[0].source.media_type",
            "required",
        ),
        (
            "/v1/messages",
            message("assistant", IMAGE),
            "messages[0].content[0]",
            "can't hold",
        ),
        (
            "/v1/messages",
            message("system", IMAGE),
            "messages[0].content[0]",
            "can't hold",
        ),
        (
            "/v1/messages",
            message("user", RESULT),
            "messages[0].content[0].content",
            "only a user",
        ),
        (
            "/v1/messages/count_tokens",
            message("user", IMAGE),
            "messages[0].content[0].source",
            "count text",
        ),
        (
            "/v1/responses",
            item("user", {"type": "input_image", "image_url": FAR}),
            "input[0].content[0].image_url",
            "fetches nothing",
        ),
        (
            "/v1/responses",
            item("user", {"type": "input_image", "file_id": "file-1"}),
            "input[0].content[0].image_url",
            "data URL",
        ),
        (
            "/v1/responses",
            item("developer", INPUT),
            "input[0].content",
            "only a user",
        ),
        ("/v1/responses", {"input": [OUTPUT]}, "input[0].output", "only a user"),
    ],
)
async def test_other_pictures_are_refused_by_name(
    running: Running,
    http: httpx.AsyncClient,
    route: str,
    asked: dict[str, Any],
    param: str,
    said: str,
) -> None:
    more = {"max_tokens": 9} if route == "/v1/messages" else {}
    response = await http.post(route, json={"model": MODEL, **asked, **more})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert said in error["message"]
    assert not running.cluster.admits


async def test_pictures_of_open_requests_are_bounded(
    running: Running, http: httpx.AsyncClient
) -> None:
    three = chat(data_url(RED), n=3)
    response = await http.post(ROUTE, json=three)
    assert response.status_code == 503, response.text
    assert "pictures of open requests" in response.json()["error"]["message"]
    # what has ended counts no longer
    for _ in range(3):
        response = await http.post(ROUTE, json=chat(data_url(RED), data_url(BLUE)))
        assert response.status_code == 200, response.text


async def test_a_gateway_without_room_for_large_messages_is_overloaded(
    running: Running, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker is to blame for it, so none is taken for dead."""
    bus = running.node.bus
    request = bus.request

    async def full(subject: str, message: Message, *, timeout_s: float) -> AnyMessage:
        if isinstance(message, PictureWork):
            raise LimitError("too much waits to be fetched", limit="shelf_bytes")
        return await request(subject, message, timeout_s=timeout_s)

    monkeypatch.setattr(bus, "request", full)
    response = await http.post(ROUTE, json=chat(data_url(RED)))
    assert response.status_code == 503, response.text
    assert response.json()["error"]["code"] == "server_is_overloaded"
    (ended,) = running.cluster.ended
    assert ended.outcome is Outcome.REJECTED


async def test_tokens_of_pictures_are_not_counted(http: httpx.AsyncClient) -> None:
    response = await http.post("/tokenize", json=chat(data_url(RED)))
    assert response.status_code == 400
    assert "count text" in response.json()["error"]["message"]


async def test_a_model_that_sees_nothing_gets_no_pictures(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=20) as http:
            response = await http.post(ROUTE, json=chat(data_url(RED)))
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "messages[0].content[0].image_url"
        assert "takes no pictures" in error["message"]
        assert not running.cluster.admits
