"""Metrics, timed calls, RDMA without RDMA, the bench."""

import contextlib
import importlib.util
import threading

import pytest
from hypothesis import given, strategies as st
from prometheus_client import CollectorRegistry

from kvtide.runtime import SystemClock
from kvtide.transfer import Operation, PrometheusObserver, Refused, bench
from kvtide.transfer.alarm import Alarm
from kvtide.transfer.bench_figures import table
from kvtide.transfer.rdma_wire import (
    Reach,
    pack_check,
    pack_pair,
    pack_reach,
    unpack_check,
    unpack_pair,
    unpack_reach,
)
from kvtide.transfer.verbs import PairAddress, device_names
from kvtide.transfer.wire import Ask, FrameError


def test_metrics() -> None:
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry)
    observer.transferred("tcp", "reuse", Operation.READ, 100, 0.5)
    observer.transferred("tcp", "reuse", Operation.READ, 50, 0.5)
    observer.served("tcp", "drain", Operation.WRITE, 7)
    observer.failed("shm", "reuse", Operation.READ, "timed_out")
    observer.retried("tcp", "reuse", "corrupt")
    observer.refused("an HTTP request")

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvtide_transfer_{name}", labels)

    ours = {"path": "tcp", "purpose": "reuse", "operation": "read"}
    assert value("bytes_total", **ours, side="client") == 150
    assert value("operations_total", **ours, side="client") == 2
    assert value("seconds_count", **ours) == 2
    theirs = {"path": "tcp", "purpose": "drain", "operation": "write"}
    assert value("bytes_total", **theirs, side="server") == 7
    failed = {"path": "shm", "purpose": "reuse", "operation": "read"}
    assert value("errors_total", **failed, kind="timed_out") == 1
    assert value("retries_total", path="tcp", purpose="reuse", kind="corrupt") == 1
    assert value("refused_total") == 1


def test_alarm_calls_in_order_and_survives_errors() -> None:
    clock = SystemClock()
    alarm = Alarm(clock)
    calls: list[int] = []
    done = threading.Event()
    now_s = clock.monotonic()
    alarm.at(now_s + 0.02, lambda: calls.append(2))
    alarm.at(now_s + 0.01, lambda: calls.append(1 // 0))
    alarm.at(now_s + 0.03, done.set)
    alarm.at(now_s, lambda: calls.append(1))
    assert done.wait(10)
    alarm.at(now_s + 3600, lambda: calls.append(3))
    alarm.close()
    alarm.at(now_s, lambda: calls.append(4))
    assert calls == [1, 2]


# ---- RDMA without RDMA


@pytest.mark.parametrize("expires_in_s", [None, 2.5])
def test_rdma_bodies_round_trip(expires_in_s: float | None) -> None:
    reach = Reach(0x7F00_0000_1000, 4096, expires_in_s, (17, 2**32 - 1))
    assert unpack_reach(pack_reach(reach)) == reach
    address = PairAddress(77, 78, "::ffff:10.77.0.1")
    assert unpack_pair(pack_pair(3, address, b"l" * 16)) == (3, address, b"l" * 16)
    ask = Ask([(1, bytes(25))], [(0, 8, 4), (0, 12, 4)], "reuse")
    assert unpack_check(pack_check(ask, [1, 2**64 - 1])) == (ask, (1, 2**64 - 1))


@given(st.binary(max_size=120))
def test_any_rdma_body_is_well_formed_or_refused(body: bytes) -> None:
    for unpack in (unpack_reach, unpack_pair, unpack_check):
        with contextlib.suppress(FrameError):
            unpack(body)


def test_rdma_says_what_is_missing() -> None:
    if importlib.util.find_spec("pyverbs") is None:
        with pytest.raises(Refused, match="make rdma"):
            device_names()
    else:
        assert isinstance(device_names(), list)


# ---- the bench


def test_bench_measures_everything_once() -> None:
    figures = bench.run(sizes=(4096,), rounds=1, seconds=0.005)
    names = {figure.name for figure in figures}
    assert {"tcp read 4 KiB", "shm write 4 KiB x8", "bare socket 4 KiB"} <= names
    assert all(figure.value > 0 for figure in figures)
    rated = [figure for figure in figures if figure.limit]
    assert rated
    assert all(figure.ratio is not None for figure in rated)
    assert len(table(figures).splitlines()) == 2 + len(figures)
