"""Which network card is near which memory: found in the system, or given as JSON.

{"cpu:0": {"preferred": ["mlx5_0"], "secondary": ["mlx5_1"]},
"cuda:0": {"preferred": ["mlx5_1"], "secondary": ["mlx5_0"]}}
"""

import os
import re
from collections.abc import Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import msgspec

from kvtide.runtime import ConfigError

CROSSING_PENALTY = 1.5
"""How much longer a transfer is expected to take over a card on another NUMA node."""

_DISPLAY_CLASSES = ("0x0300", "0x0302")
_NVIDIA = "0x10de"
_PCI = re.compile(
    r"pci[0-9a-f]{4}:[0-9a-f]{2}|[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
)


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

    def penalties(self, card: str) -> dict[str, float]:
        """``penalty`` of a card for all locations that are far from it."""
        return {
            location: CROSSING_PENALTY
            for location, near in self.near.items()
            if card in near.secondary
        }

    @property
    def crosses(self) -> bool:
        """Whether any card is far from any memory: else where memory lies is no matter."""
        return any(near.secondary for near in self.near.values())

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

    Cards are the RDMA devices and the network cards that are devices. A GPU prefers
    those of its NUMA node that are below the same PCI switches as it, if there are any.
    With one NUMA node, or where the kernel does not know, all are near all memory.
    """
    cards = _cards(system)
    near = {f"cpu:{node}": _near(node, (), cards) for node in _cpu_nodes(system)}
    for index, (node, place) in enumerate(_gpus(system)):
        near[f"cuda:{index}"] = _near(node, place, cards)
    return Topology(near)


def home(
    system: Path = Path("/sys"), processors: AbstractSet[int] | None = None
) -> str:
    """The location whose node has all of the processors that this process may use.

    "cpu:0" when they are on several nodes, or the kernel does not know.
    """
    if processors is None:
        processors = os.sched_getaffinity(0)
    for node in _cpu_nodes(system):
        path = system / "devices" / "system" / "node" / f"node{node}" / "cpulist"
        if processors and processors <= _numbers(_text(path)):
            return f"cpu:{node}"
    return "cpu:0"


@dataclass(frozen=True, slots=True)
class _Card:
    name: str
    node: int
    place: tuple[str, ...]
    """The PCI bridges above it, from the root on."""


def _near(node: int, place: Sequence[str], cards: Sequence[_Card]) -> Near:
    local = [card for card in cards if node == -1 or card.node in (node, -1)]
    shared = {card.name: _common(place, card.place) for card in local}
    # the root complex alone says no more than the node does
    most = max(shared.values(), default=0)
    if most > 1:
        local = [card for card in local if shared[card.name] == most]
    preferred = tuple(card.name for card in local)
    others = tuple(card.name for card in cards if card.name not in preferred)
    return Near(preferred, others)


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _cards(system: Path) -> list[_Card]:
    return [
        _Card(path.name, _number(device / "numa_node"), _place(device))
        for kind in ("infiniband", "net")
        for path in _entries(system / "class" / kind)
        for device in (path / "device",)
        # software devices (loopback, bridges) have no device below
        if kind == "infiniband" or device.exists()
    ]


def _place(device: Path) -> tuple[str, ...]:
    parts = device.resolve().parts if device.is_symlink() else ()
    return tuple(part for part in parts[:-1] if _PCI.fullmatch(part))


def _cpu_nodes(system: Path) -> list[int]:
    folder = system / "devices" / "system" / "node"
    names = [path.name.removeprefix("node") for path in _entries(folder)]
    return sorted(int(name) for name in names if name.isdigit()) or [0]


def _gpus(system: Path) -> list[tuple[int, tuple[str, ...]]]:
    return [
        (_number(path / "numa_node"), _place(path))
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


def _numbers(text: str) -> set[int]:
    """The kernel's lists: ``0-3,8``."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return found
