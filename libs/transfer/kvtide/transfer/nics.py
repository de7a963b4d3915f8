"""This machine's network cards: which there are, and which leads to a host."""

import socket
from pathlib import Path

import psutil


def hosts_here(system: Path = Path("/sys")) -> tuple[str, ...]:
    """IPv4 addresses of the cards that are up, without loopback and bridges; sorted.

    Bridges are left out because those of container engines have the same address on
    every machine.
    """
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = {
        each.address
        for name, addresses in psutil.net_if_addrs().items()
        if name in up and not (system / "class" / "net" / name / "bridge").exists()
        for each in addresses
        if each.family == socket.AF_INET and not each.address.startswith("127.")
    }
    return tuple(sorted(found))


def card_towards(host: str) -> str:
    """The name of our card that packets to ``host`` leave by, "" if unknown."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # sends nothing: the kernel chooses a route
            probe.connect((host, 9))
            ours = probe.getsockname()[0]
    except OSError:
        return ""
    return next(
        (
            name
            for name, addresses in psutil.net_if_addrs().items()
            if any(each.address == ours for each in addresses)
        ),
        "",
    )
