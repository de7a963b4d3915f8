"""Strangers at every port, and requests that mean harm, under load."""

import contextlib
import os
import pickle
import random
import socket
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.chaos.rounds import disturbed, noted
from tests.chaos.site import TRANSFER_HOST, ChaosSite
from tests.chaos.watch import resident_mib
from tests.e2e.fault_rounds import Question
from tests.e2e.oracle.prompts import text_tokens

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

THROWS_S = 20.0
MOST_GROWN_MIB = 96
KIB = 1 << 10
DEEP = b"[" * 100_000
HUGE_ARRAY = b"\xdd\xff\xff\xff\xff"


class Bomb:
    """Touches a file where somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def throw(host: str, port: int, data: bytes) -> None:
    """Send, and read what comes back for at most two seconds."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), 2) as at:
        at.settimeout(2)
        at.sendall(data)
        while at.recv(64 * KIB):
            pass


def published(subject: str, data: bytes) -> bytes:
    """What a client of NATS says to publish it."""
    return (
        b'CONNECT {"verbose":false}\r\n'
        + f"PUB {subject} {len(data)}\r\n".encode()
        + data
        + b"\r\nPING\r\n"
    )


def subjects(site: ChaosSite) -> list[str]:
    """Every subject that something is said on in three seconds."""
    found: set[str] = set()
    with socket.create_connection(("127.0.0.1", site.cluster.nats.port), 2) as at:
        at.sendall(b'CONNECT {"verbose":false}\r\nSUB > 1\r\n')
        end_s = time.monotonic() + 3.0
        at.settimeout(0.5)
        heard = b""
        while time.monotonic() < end_s:
            with contextlib.suppress(TimeoutError):
                heard += at.recv(1 << 20)
    for line in heard.split(b"\r\n"):
        words = line.split(b" ")
        if words[0] in (b"MSG", b"HMSG") and len(words) >= 4:
            found.add(words[1].decode(errors="replace"))
    return sorted(one for one in found if not one.startswith("_INBOX"))


def nonsense(chance: random.Random, bomb: bytes) -> bytes:
    """Random bytes, or what some parser may trip over."""
    return chance.choice(
        (
            chance.randbytes(chance.randrange(1, 4 * KIB)),
            bomb,
            HUGE_ARRAY,
            DEEP,
            struct.pack("<I", 0xFFFFFFFF) * 8,
            struct.pack(">I", 0x7FFFFFFF) + bomb,
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1073741824\r\n\r\n{",
            b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 2000,
        )
    )


def test_strangers_throw_bytes_at_every_port(
    site: ChaosSite, asked: Sequence[Question], tmp_path: Path
) -> None:
    chance = random.Random(19)  # noqa: S311 - to do it again
    mark = tmp_path / "unpickled"
    bomb = pickle.dumps(Bomb(mark))
    bombs = 0
    pids = {name: site.cluster[name].pid for name in site.names}
    done = f"nonsense and pickles thrown at all ports and subjects, {THROWS_S:.0f} s"
    pickles = "pickles thrown at all ports and subjects"
    with (
        noted("F24", pickles) as opened,
        disturbed(site, asked, "F19", done) as it,
    ):
        before = {name: resident_mib(pid) for name, pid in pids.items()}
        http = [
            int(p.http_url.rpartition(":")[2]) for p in site.cluster.processes.values()
        ]
        transfer = [link.port for link in site.cluster.to_transfer.values()]
        said_on = subjects(site)
        assert len(said_on) > 5, said_on
        end_s = time.monotonic() + THROWS_S
        throwers: list[threading.Thread] = []
        while time.monotonic() < end_s:
            data = nonsense(chance, bomb)
            subject = published(chance.choice(said_on), data[: 200 * KIB])
            where = (
                ("127.0.0.1", chance.choice(http), data),
                (TRANSFER_HOST, chance.choice(transfer), data),
                ("127.0.0.1", chance.choice(transfer), data),
                ("127.0.0.1", site.cluster.nats.port, subject),
            )
            for each in where:
                throwers.append(threading.Thread(target=throw, args=each))
                throwers[-1].start()
                it.did()
                bombs += bomb in data
            time.sleep(0.1)
        for thread in throwers:
            thread.join(30)
        it.load.answered(2)
        assert not mark.exists(), "somebody unpickled it"
        assert {name: site.cluster[name].pid for name in site.names} == pids
        assert all(site.cluster[name].alive for name in site.names)
        grown = {name: resident_mib(pid) - before[name] for name, pid in pids.items()}
        assert max(grown.values()) < MOST_GROWN_MIB, grown
        it.saw(
            f"no process ended, none grew by more than {max(grown.values()):.0f} MiB"
        )
        it.saw(f"{len(said_on)} subjects")
        assert bombs > 0
        opened.did(bombs)
        opened.saw("none was opened")


def test_caches_are_apart_unless_shared(
    site: ChaosSite, asked: Sequence[Question]
) -> None:
    """Another salt is another space, also where one's text is the other's name."""
    prompt = text_tokens(site.tokenize, 260, 50_000)
    with disturbed(site, asked, "F18", "one prompt under four salts") as it:
        cached: dict[str, int] = {}
        for salt in ("a", "b", "default", "a\0"):
            fields = {"ignore_eos": True, "cache_salt": salt}
            cold = site.complete(prompt, 4, **fields)
            warm = site.complete(prompt, 4, **fields)
            assert cold.cached_tokens == 0, (salt, cached)
            assert warm.ids == cold.ids
            cached[salt] = warm.cached_tokens
            it.did()
        assert any(cached.values()), "nothing was ever cached"
        it.saw(f"cold each time; cached when asked again: {list(cached.values())}")


def test_models_are_names_on_a_list(site: ChaosSite) -> None:
    names = (
        "../../etc/passwd",
        "%2e%2e/%2e%2e/etc/passwd",
        "/etc/passwd",
        "a\0b",
        "a/b",
    )
    paths = (
        "/v1/models/../../../etc/passwd",
        "/ui/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "/ui/..%2f..%2f..%2fetc/passwd",
        "/ui/static/%2fetc%2fpasswd",
    )
    with noted("F22", "paths as models and in URLs") as it:
        for name in names:
            body = {"model": name, "prompt": "x", "max_tokens": 1}
            answer = site.http.post("/v1/completions", json=body)
            assert answer.status_code == 404, answer.text
            assert "root:" not in answer.text
            it.did()
        for path in paths:
            assert "root:" not in raw(site, path)
            it.did()
        it.saw("404 each")


def raw(site: ChaosSite, path: str) -> str:
    """What the gateway answers to a path that no client has tidied."""
    host, port = site.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 5) as at:
        at.settimeout(5)
        at.sendall(
            f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
        )
        got = b""
        while chunk := at.recv(64 * KIB):
            got += chunk
    assert got.startswith(b"HTTP/1.1 4"), got[:100]
    return got.decode(errors="replace")


def test_nothing_is_fetched_for_a_client(site: ChaosSite) -> None:
    """URLs in a request are not followed: nobody comes to the port that they name."""
    done = "URLs of ours as image, tool, webhook and NATS address"
    with noted("F23", done) as it, socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(2)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/x.png"
        image = {"type": "image_url", "image_url": {"url": url}}
        told = {"role": "user", "content": [{"type": "text", "text": url}, image]}
        bodies = (
            {"model": site.model, "messages": [told], "max_tokens": 1},
            {
                "model": site.model,
                "messages": [{"role": "user", "content": url}],
                "max_tokens": 1,
                "nats": url,
                "webhook": url,
                "tools": [{"type": "function", "function": {"name": "f", "url": url}}],
            },
        )
        statuses = [
            site.http.post("/v1/chat/completions", json=body).status_code
            for body in bodies
        ]
        assert statuses[0] == 400
        with pytest.raises(TimeoutError):
            trap.accept()
        it.did(4)
        it.saw("nobody came")
