"""Pictures over HTTP: to workers that see them, and refused for those that don't."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
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
