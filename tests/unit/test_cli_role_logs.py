"""Log files of processes: bounded while they are written, and read for errors."""

import os
import socket
from pathlib import Path

import pytest

from kvtide.cli.supervisor.addresses import free_ports, require_free
from kvtide.cli.supervisor.role_logs import RoleLog
from kvtide.runtime import ConfigError


def write(fd: int, text: str) -> None:
    os.write(fd, text.encode())


def test_only_new_error_lines_are_news(tmp_path: Path) -> None:
    log = RoleLog(tmp_path / "logs", "store")
    fd = log.open()
    write(fd, "2026-11-29T20:00:00Z [error    ] old\n")
    os.close(fd)
    fd = log.open()
    write(fd, "2026-11-29T20:00:00Z [info     ] fine\n")
    write(fd, "2026-11-29T20:00:00Z [error    ] bad thing\n")
    write(fd, '{"level": "critical", "event": "worse"}\n2026 [error    ] half')
    assert log.news() == [
        "2026-11-29T20:00:00Z [error    ] bad thing",
        '{"level": "critical", "event": "worse"}',
    ]
    write(fd, " a line\n")
    assert log.news() == ["2026 [error    ] half a line"]
    assert log.news() == []
    os.close(fd)


def test_a_file_is_cut_while_its_process_writes(tmp_path: Path) -> None:
    log = RoleLog(tmp_path, "store", max_bytes=1000)
    fd = log.open()
    for number in range(50):
        write(fd, f"line {number:04d} {'x' * 40}\n")
        log.bound()
        assert log.path.stat().st_size <= 1000
    write(fd, "last\n")
    os.close(fd)
    assert log.tail(1) == ["last"]
    kept = (tmp_path / "store.log.1").read_bytes()
    assert 0 < len(kept) <= 1000
    assert (tmp_path / "store.log").read_bytes().count(b"\0") == 0


def test_the_tail_of_a_file_that_is_not_there(tmp_path: Path) -> None:
    log = RoleLog(tmp_path, "store")
    assert log.tail() == []
    assert log.news() == []
    log.bound()


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken"):
            require_free("127.0.0.1", port)
    require_free("127.0.0.1", port)


def test_a_foreign_address_is_named() -> None:
    with pytest.raises(ConfigError, match=r"can't listen on 192\.0\.2\.1 port 8000"):
        require_free("192.0.2.1", 8000)


def test_free_ports_differ() -> None:
    assert len(set(free_ports(20))) == 20
