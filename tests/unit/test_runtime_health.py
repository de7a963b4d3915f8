"""The health server answers, refuses garbage, stays bounded and frees its port."""

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from kvtide.runtime import ConfigError
from kvtide.runtime.health import MAX_CONNECTIONS, HealthServer, Readiness
from kvtide.runtime.metrics import new_registry


@dataclass
class Role:
    readiness: Readiness = field(default_factory=lambda: Readiness(True, "ready"))
    alive: bool = True
    broken: bool = False

    def ready(self) -> Readiness:
        if self.broken:
            raise RuntimeError
        return self.readiness


@pytest.fixture(scope="module")
def role() -> Role:
    return Role()


@pytest.fixture(scope="module")
def server(role: Role) -> Iterator[HealthServer]:
    registry = new_registry(role="store", node="store-reef-01")
    with HealthServer(
        registry=registry,
        readiness=role.ready,
        alive=lambda: role.alive,
        pages={"/waves": lambda: {"high": 3}, "/tide": lambda: None},
    ) as server:
        yield server


def get(server: HealthServer, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def raw(server: HealthServer, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := client.recv(4096):
            answer += chunk
        return answer


def test_readiness_says_what_it_waits_for(server: HealthServer, role: Role) -> None:
    assert get(server, "/readyz")[0] == 200
    role.readiness = Readiness(False, "loading", {"step": "weights"})
    status, body = get(server, "/readyz?verbose")
    assert status == 503
    assert json.loads(body) == {"ready": False, "state": "loading", "step": "weights"}
    role.broken = True
    assert get(server, "/readyz")[0] == 500
    role.broken = False
    role.readiness = Readiness(True, "ready")
    assert get(server, "/readyz")[0] == 200


def test_liveness_is_its_own_answer(server: HealthServer, role: Role) -> None:
    assert get(server, "/livez") == (200, "ok\n")
    role.alive = False
    assert get(server, "/livez")[0] == 503
    role.alive = True


async def test_metrics_count_the_tasks_of_the_loop() -> None:
    loop = asyncio.get_running_loop()
    registry = new_registry(role="store", node="x", loop=loop)
    before = registry.get_sample_value("kvtide_tasks")
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(asyncio.sleep(60)) for _ in range(3)]
        scraped = await asyncio.to_thread(registry.get_sample_value, "kvtide_tasks")
        for task in tasks:
            task.cancel()
    assert before is not None
    assert scraped == before + 3


def test_metrics_carry_the_build(server: HealthServer) -> None:
    status, body = get(server, "/metrics")
    assert status == 200
    assert 'kvtide_build_info{node="store-reef-01"' in body
    assert "process_resident_memory_bytes" in body


def test_pages_of_its_own_are_json(server: HealthServer) -> None:
    assert get(server, "/waves?now") == (200, '{"high": 3}\n')
    assert get(server, "/tide")[0] == 503
    status, body = get(server, "/")
    assert status == 404
    assert "/waves" in body


def test_other_paths_and_methods_are_refused(server: HealthServer) -> None:
    assert get(server, "/")[0] == 404
    assert get(server, "/livez", "POST")[0] == 405
    assert get(server, "/livez", "HEAD") == (200, "")


@given(st.binary(max_size=300))
@settings(max_examples=40, deadline=None)
def test_garbage_never_stops_it(server: HealthServer, data: bytes) -> None:
    answer = raw(server, data)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
    assert get(server, "/livez")[0] == 200


def test_an_endless_head_is_cut(server: HealthServer) -> None:
    try:
        answer = raw(server, b"GET /livez HTTP/1.1\r\n" + b"a: b\r\n" * 5000)
    except OSError:
        answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
    assert get(server, "/livez")[0] == 200


def test_connections_are_bounded_and_come_back(server: HealthServer) -> None:
    idle = [
        socket.create_connection(("127.0.0.1", server.port), timeout=10)
        for _ in range(MAX_CONNECTIONS + 8)
    ]
    try:
        # those past the limit are told so at once, in whatever order they were taken
        answers = [client.recv(100) for client in idle[MAX_CONNECTIONS:]]
        assert all(answer.startswith(b"HTTP/1.1 503") for answer in answers)
    finally:
        for client in idle:
            client.close()
    deadline = threading.Event()
    for _ in range(200):
        if get(server, "/livez")[0] == 200:
            break
        deadline.wait(0.02)
    assert get(server, "/livez")[0] == 200


def test_a_taken_port_is_named_and_close_frees_it() -> None:
    registry = new_registry(role="store", node="x")

    def server(port: int) -> HealthServer:
        return HealthServer(
            registry=registry, readiness=lambda: Readiness(True, "ready"), port=port
        )

    first = server(0)
    port = first.start()
    with pytest.raises(ConfigError, match=str(port)):
        server(port).start()
    first.close()
    first.close()
    second = server(port)
    assert second.start() == port
    second.close()
