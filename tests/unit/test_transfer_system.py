"""Topology from sysfs and from JSON, metrics, timed calls."""

import contextlib
import importlib.util
import threading
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from prometheus_client import CollectorRegistry

from kvtide.runtime import ConfigError, SystemClock
from kvtide.transfer import Operation, PrometheusObserver, Refused, bench
from kvtide.transfer.alarm import Alarm
from kvtide.transfer.bench_figures import table
from kvtide.transfer.rdma_wire import (
    Reach,
    pack_pair,
    pack_reach,
    unpack_pair,
    unpack_reach,
)
from kvtide.transfer.topology import Near, Topology, discover, from_json
from kvtide.transfer.verbs import PairAddress, device_names
from kvtide.transfer.wire import FrameError


def put(root: Path, path: str, text: str = "") -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def two_sockets(root: Path) -> None:
    for node in (0, 1):
        put(root, f"devices/system/node/node{node}/cpulist")
        put(root, f"class/infiniband/mlx5_{node}/device/numa_node", f"{node}\n")
        put(root, f"bus/pci/devices/0000:{node}1:00.0/class", "0x030200\n")
        put(root, f"bus/pci/devices/0000:{node}1:00.0/vendor", "0x10de\n")
        put(root, f"bus/pci/devices/0000:{node}1:00.0/numa_node", f"{node}\n")
    put(root, "devices/system/node/online", "0-1")
    put(root, "bus/pci/devices/0000:00:1f.0/class", "0x060100\n")


def test_discovered(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    zero = Near(("mlx5_0",), ("mlx5_1",))
    one = Near(("mlx5_1",), ("mlx5_0",))
    found = discover(tmp_path)
    assert found == Topology(
        {"cpu:0": zero, "cpu:1": one, "cuda:0": zero, "cuda:1": one}
    )
    assert found.cards("cpu:1") == ("mlx5_1", "mlx5_0")
    assert found.penalty("cpu:0", "mlx5_1") > found.penalty("cpu:0", "mlx5_0") == 1
    assert found.penalty("cpu:9", "mlx5_1") == 1
    assert found.lines()[0] == "cpu:0: mlx5_0; farther: mlx5_1"


def test_without_rdma_or_numa(tmp_path: Path) -> None:
    assert discover(tmp_path) == Topology({"cpu:0": Near()})
    put(tmp_path, "class/net/eth0/device/numa_node", "-1\n")
    put(tmp_path, "class/net/lo/mtu", "65536")
    assert discover(tmp_path) == Topology({"cpu:0": Near(("eth0",))})


def test_this_machine() -> None:
    assert "cpu:0" in discover().near


def test_json_round_trip(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    found = discover(tmp_path)
    assert from_json(found.to_json()) == found


@pytest.mark.parametrize("text", ["", "[]", '{"cpu:0": {"preferred": "mlx5_0"}}'])
def test_wrong_json(text: str) -> None:
    with pytest.raises(ConfigError, match="topology"):
        from_json(text)


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
    assert unpack_pair(pack_pair(3, address)) == (3, address)


@given(st.binary(max_size=120))
def test_any_rdma_body_is_well_formed_or_refused(body: bytes) -> None:
    for unpack in (unpack_reach, unpack_pair):
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
