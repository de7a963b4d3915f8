"""RDMA and GPU devices. Neither is needed."""

import re
from importlib import metadata
from pathlib import Path

from kvtide.cli.doctor.findings import Finding, Level
from kvtide.transfer import Refused
from kvtide.transfer.topology import discover, home
from kvtide.transfer.verbs import device_names

_INFINIBAND = Path("/sys/class/infiniband")
_NVIDIA = Path("/proc/driver/nvidia/gpus")


def rdma_devices(folder: Path = _INFINIBAND) -> list[str]:
    """Devices with an active port, and the others with their state."""
    found: list[str] = []
    if not folder.is_dir():
        return found
    for device in sorted(folder.iterdir()):
        states = [
            state.read_text().split(":")[-1].strip()
            for state in sorted(device.glob("ports/*/state"))
        ]
        found.append(f"{device.name} ({', '.join(states) or 'no port'})")
    return found


def rdma(folder: Path = _INFINIBAND, library: bool | None = None) -> Finding:
    """RDMA devices, and the library to use them (None: look for it)."""
    devices = rdma_devices(folder)
    if library is None:
        library = _verbs_load()
    if not devices:
        there = "pyverbs is there" if library else "pyverbs is missing"
        text = f"no device: TCP is used between hosts ({there}, and not needed)"
        return Finding("RDMA", Level.OK, text)
    text = ", ".join(devices)
    if not library:
        advice = "apt-get install python3-pyverbs ibverbs-providers, then make rdma"
        return Finding(
            "RDMA", Level.WARN, f"{text}; pyverbs is missing or does not load", advice
        )
    if not any("ACTIVE" in device for device in devices):
        advice = "bring a port up (rdma link, ibstat)"
        return Finding("RDMA", Level.WARN, f"{text}; no active port", advice)
    return Finding("RDMA", Level.OK, f"{text}; pyverbs is there")


def _verbs_load() -> bool:
    """Whether pyverbs is there and fits this Python and the system's libraries."""
    try:
        device_names()
    except Refused:
        return False
    return True


def topology(system: Path = Path("/sys")) -> list[Finding]:
    """For each memory, the network cards that are near it and those that are farther."""
    found = discover(system)
    text = f"this process is at {home(system)}"
    first = Finding("topology", Level.OK, text, matrix=found.near)
    return [first, *(Finding("topology", Level.OK, line) for line in found.lines())]


def gpu(folder: Path = _NVIDIA) -> Finding:
    """GPUs, and whether torch can use them."""
    models = sorted(
        match.group(1).strip()
        for file in folder.glob("*/information")
        if (match := re.search(r"^Model:\s*(.*)$", file.read_text(), re.MULTILINE))
    )
    build = torch_version()
    if not models:
        return Finding("GPU", Level.OK, f"none: models run on the CPU (torch {build})")
    text = f"{', '.join(models)} (torch {build})"
    if "+cpu" in build:
        advice = "set TORCH_INDEX_URL to the index of a CUDA build, and set up again"
        return Finding("GPU", Level.WARN, f"{text} has no CUDA", advice)
    text = f"{text}; the engine computes on the CPU in this version"
    return Finding("GPU", Level.OK, text)


def torch_version() -> str:
    """The installed build of torch, without importing it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "not installed"
