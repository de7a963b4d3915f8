"""Which network card is near which memory: found in the system, or given as JSON.

{"cpu:0": {"preferred": ["mlx5_0"], "secondary": ["mlx5_1"]},
"cuda:0": {"preferred": ["mlx5_1"], "secondary": ["mlx5_0"]}}
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvtide.runtime import ConfigError

CROSSING_PENALTY = 1.5
"""How much longer a transfer is expected to take over a card on another NUMA node."""

_DISPLAY_CLASSES = ("0x0300", "0x0302")
_NVIDIA = "0x10de"


@dataclass(frozen=True, slots=True)
class Near:
    """The cards for one location, best first."""

    preferred: tuple[str, ...] = ()
    secondary: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Topology:
    """For each location ("cpu:<numa node>", "cuda:<index>") its cards."""

    near: Mapping[str, Near]

    def cards(self, location: str) -> tuple[str, ...]:
        """All cards for a location, best first; () when it is not known."""
        near = self.near.get(location, Near())
        return near.preferred + near.secondary

    def penalty(self, location: str, card: str) -> float:
        """What to multiply expected times by; 1 where nothing is known against it."""
        if card in self.near.get(location, Near()).secondary:
            return CROSSING_PENALTY
        return 1.0

    def to_json(self) -> str:
        """The form that ``from_json`` takes."""
        return msgspec.json.format(msgspec.json.encode(dict(self.near))).decode()

    def lines(self) -> list[str]:
        """For people: one line for each location."""
        return [
            f"{location}: "
            + (", ".join(near.preferred) or "no card near")
            + (f"; farther: {', '.join(near.secondary)}" if near.secondary else "")
            for location, near in sorted(self.near.items())
        ]


def from_json(text: str) -> Topology:
    """The matrix that a person wrote.

    Raises:
        ConfigError: it is not of the module's form; the message says where.
    """
    try:
        near = msgspec.json.decode(text, type=dict[str, Near])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"the topology is wrong: {error}", key="topology") from error
    return Topology(near)


def discover(system: Path = Path("/sys")) -> Topology:
    """The matrix as the kernel tells it: cards are near what is on their NUMA node.

    Cards are the RDMA devices; on a machine without any, the network cards that are
    devices. With one NUMA node, or where the kernel does not know, all are near all.
    """
    cards = _cards(system)
    near = {f"cpu:{node}": _near(node, cards) for node in _cpu_nodes(system)}
    for index, node in enumerate(_gpu_nodes(system)):
        near[f"cuda:{index}"] = _near(node, cards)
    return Topology(near)


def _near(node: int, cards: Sequence[tuple[str, int]]) -> Near:
    preferred = tuple(name for name, at in cards if at in (node, -1) or node == -1)
    return Near(preferred, tuple(name for name, _ in cards if name not in preferred))


def _cards(system: Path) -> list[tuple[str, int]]:
    for kind in ("infiniband", "net"):
        folder = system / "class" / kind
        found = [
            (path.name, _number(path / "device" / "numa_node"))
            for path in _entries(folder)
            # software devices (loopback, bridges, Soft-RoCE) have no device below
            if kind == "infiniband" or (path / "device").exists()
        ]
        if found:
            return found
    return []


def _cpu_nodes(system: Path) -> list[int]:
    folder = system / "devices" / "system" / "node"
    names = [path.name.removeprefix("node") for path in _entries(folder)]
    return sorted(int(name) for name in names if name.isdigit()) or [0]


def _gpu_nodes(system: Path) -> list[int]:
    return [
        _number(path / "numa_node")
        for path in _entries(system / "bus" / "pci" / "devices")
        if _text(path / "class")[:6] in _DISPLAY_CLASSES
        and _text(path / "vendor") == _NVIDIA
    ]


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.lstrip("-").isdigit() else -1
