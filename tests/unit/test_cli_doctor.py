"""What the doctor says of one fact or another."""

from pathlib import Path

import pytest

from kvtide.cli.commands.doctor import look
from kvtide.cli.doctor import devices, machine, services
from kvtide.cli.doctor.findings import Finding, Level
from kvtide.transfer.topology import Near

SHM = Path("/dev/shm")  # noqa: S108 - only its name


@pytest.mark.parametrize(
    ("finding", "level", "advice"),
    [
        (machine.judge_memory(1 << 30), Level.WARN, "free some"),
        (machine.judge_memory(1 << 34), Level.OK, ""),
        (
            machine.judge_shared_memory(SHM, "tmpfs", 64 << 20, 64 << 20),
            Level.WARN,
            "size",
        ),
        (
            machine.judge_shared_memory(SHM, "ext4", 1 << 34, 1 << 34),
            Level.WARN,
            "tmpfs",
        ),
        (machine.judge_shared_memory(SHM, "tmpfs", 1 << 34, 1 << 33), Level.OK, ""),
        (machine.shared_memory(None), Level.WARN, "shm_dir"),
        (machine.shared_memory(Path("/nonexistent")), Level.FAIL, "shm_dir"),
        (machine.judge_disk(Path("/x"), 1 << 20), Level.WARN, "free some"),
        (machine.judge_disk(Path("/x"), 1 << 40), Level.OK, ""),
        (machine.judge_open_files(1024, 4096), Level.WARN, "ulimit -n"),
        (machine.judge_open_files(65536, 65536), Level.OK, ""),
        (services.judge_payload("nats://h:1", 64 << 10), Level.FAIL, "max_payload"),
        (services.judge_payload("nats://h:1", 1 << 20), Level.OK, ""),
        (services.judge_revision("sqlite", services.HEAD), Level.OK, ""),
        (services.judge_revision("sqlite", None), Level.OK, ""),
        (services.judge_revision("sqlite", "0000"), Level.WARN, "migrates"),
        (services.judge_revision("sqlite", "9999"), Level.FAIL, "upgrade"),
    ],
)
def test_each_finding_says_what_to_do(
    finding: Finding, level: Level, advice: str
) -> None:
    assert finding.level is level
    assert advice in finding.advice
    assert (finding.advice == "") == (level is Level.OK)


def test_a_check_that_breaks_is_a_finding() -> None:
    def breaks() -> Finding:
        raise ValueError("odd")

    fine = Finding("b", Level.OK, "well")
    broken, other = look({"a": breaks, "b": lambda: fine})
    assert broken.level is Level.WARN
    assert "ValueError: odd" in broken.text
    assert other == fine


def test_rdma_devices_are_read_with_the_state_of_their_ports(tmp_path: Path) -> None:
    assert devices.rdma(tmp_path).level is Level.OK
    state = tmp_path / "mlx5_0" / "ports" / "1" / "state"
    state.parent.mkdir(parents=True)
    state.write_text("4: ACTIVE\n")
    assert devices.rdma_devices(tmp_path) == ["mlx5_0 (ACTIVE)"]
    assert "mlx5_0" in devices.rdma(tmp_path).text


def test_rdma_without_its_library_says_what_to_do(tmp_path: Path) -> None:
    state = tmp_path / "mlx5_0" / "ports" / "1" / "state"
    state.parent.mkdir(parents=True)
    state.write_text("4: ACTIVE\n")
    assert devices.rdma(tmp_path, library=True).level is Level.OK
    found = devices.rdma(tmp_path, library=False)
    assert found.level is Level.WARN
    assert "pyverbs is missing" in found.text
    assert "make rdma" in found.advice
    state.write_text("1: DOWN\n")
    assert "no active port" in devices.rdma(tmp_path, library=True).text
    # without a device it is no matter, and said
    none = devices.rdma(tmp_path / "none", library=False)
    assert none.level is Level.OK
    assert "pyverbs is missing" in none.text


def test_the_topology_is_a_line_for_each_memory(tmp_path: Path) -> None:
    for node in (0, 1):
        for path, text in (
            (f"devices/system/node/node{node}/cpulist", f"{9000 + node}"),
            (f"class/infiniband/mlx5_{node}/device/numa_node", str(node)),
            (f"bus/pci/devices/0000:{node}1:00.0/class", "0x030200"),
            (f"bus/pci/devices/0000:{node}1:00.0/vendor", "0x10de"),
            (f"bus/pci/devices/0000:{node}1:00.0/numa_node", str(node)),
        ):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
    found = devices.topology(tmp_path)
    assert [finding.text for finding in found] == [
        "this process is at cpu:0",
        "cpu:0: mlx5_0; farther: mlx5_1",
        "cpu:1: mlx5_1; farther: mlx5_0",
        "cuda:0: mlx5_0; farther: mlx5_1",
        "cuda:1: mlx5_1; farther: mlx5_0",
    ]
    assert found[0].matrix is not None
    assert found[0].matrix["cuda:1"] == Near(("mlx5_1",), ("mlx5_0",))


def test_gpus_are_read_from_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "none" in devices.gpu(tmp_path).text
    card = tmp_path / "0000:01:00.0"
    card.mkdir()
    (card / "information").write_text("Model: \t NVIDIA H200\nIRQ: 5\n")
    monkeypatch.setattr(devices, "torch_version", lambda: "2.13.0+cpu")
    found = devices.gpu(tmp_path)
    assert found.level is Level.WARN
    assert "NVIDIA H200" in found.text
    assert "TORCH_INDEX_URL" in found.advice
    monkeypatch.setattr(devices, "torch_version", lambda: "2.13.0+cu130")
    assert devices.gpu(tmp_path).level is Level.OK
