"""The two hosts as network namespaces, each with a veth pair to a switch of ours.

NATS, the database and the clients are here, as on a third machine. What goes between
the hosts goes over the kernel's network alone: a host is cut off by taking down its end
at the switch, the two are parted by isolating their ends from one another. Nobody is
told of either, as when a cable or a switch breaks.
"""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.chaos.link import Links
from tests.chaos.site import (
    HOSTS,
    ChaosSite,
    LinkedCluster,
    NoMountsError,
    run,
    twin_port,
)
from typing_extensions import override

_SUBNET = os.getpid() % (1 << 13)  # of a killed run the addresses may still be there
_BITS = 29


def address(machine: int) -> str:
    """0: this machine; 1 and 2: the hosts."""
    return f"10.229.{_SUBNET >> 5 & 255}.{8 * (_SUBNET & 31) + 1 + machine}"


class Network:
    """A switch, this machine and the hosts at it; all is undone with ``stack``.

    The switch has a namespace of its own: rules of this machine are not for it.
    """

    def __init__(self, stack: ExitStack) -> None:
        self.name = f"kvc{os.getpid()}"
        if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "bridge"))):
            raise NoMountsError("network namespaces need root, ip and bridge")
        self._space("s", stack)
        self._at_switch = ("ip", "netns", "exec", f"{self.name}-s")
        self._run("ip", "link", "add", "switch", "type", "bridge")
        self._run("ip", "link", "set", "switch", "up")
        own = f"{self.name}o"
        stack.callback(run, "ip", "link", "del", own)
        run("ip", "link", "add", own, "type", "veth", "peer", "name", f"{self.name}x")
        self._plug(self.end(0))
        _address(own, 0)
        for host in range(HOSTS):
            self._join(host, stack)

    def _space(self, what: str, stack: ExitStack) -> None:
        run("ip", "netns", "add", f"{self.name}-{what}")
        stack.callback(run, "ip", "netns", "del", f"{self.name}-{what}")

    def _run(self, *command: str) -> None:
        run(*self._at_switch, *command)

    def _plug(self, end: str) -> None:
        """The other end of the pair that was made last goes into the switch."""
        far = f"{self.name}x"
        run("ip", "link", "set", far, "netns", f"{self.name}-s")
        self._run("ip", "link", "set", far, "name", end)
        self._run("ip", "link", "set", end, "master", "switch", "up")

    def _join(self, host: int, stack: ExitStack) -> None:
        self._space(str(host), stack)
        near, far = f"{self.name}o{host}", f"{self.name}x"
        run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        self._plug(self.end(1 + host))
        run("ip", "link", "set", near, "netns", f"{self.name}-{host}")
        _address(near, 1 + host, *self.inside(host))
        run(*self.inside(host), "ip", "link", "set", "lo", "up")

    def end(self, machine: int) -> str:
        """A machine's end at the switch."""
        return f"port{machine}"

    def inside(self, host: int) -> tuple[str, ...]:
        """What a command begins with that runs on the host."""
        return ("ip", "netns", "exec", f"{self.name}-{host}")

    def cut_off(self, host: int) -> None:
        """Nothing reaches the host or comes from it."""
        self._run("ip", "link", "set", self.end(1 + host), "down")

    def part(self) -> None:
        """The hosts don't reach one another; both reach NATS and clients."""
        self._isolate("on")

    def heal(self) -> None:
        for host in range(HOSTS):
            self._run("ip", "link", "set", self.end(1 + host), "up")
        self._isolate("off")

    def _isolate(self, word: str) -> None:
        for host in range(HOSTS):
            self._run(
                "bridge", "link", "set", "dev", self.end(1 + host), "isolated", word
            )

    def packets(self, host: int) -> int:
        """How many the switch has sent to a host."""
        path = f"/sys/class/net/{self.end(1 + host)}/statistics/tx_packets"
        words = (*self._at_switch, "cat", path)
        return int(subprocess.run(words, capture_output=True, check=True).stdout)

    def reaches(self, host: int, machine: int) -> bool:
        """Whether a host hears from another machine's kernel, if only a refusal."""
        script = (
            "import socket, sys\n"
            "try: socket.create_connection((sys.argv[1], 9), 2)\n"
            "except ConnectionRefusedError: sys.exit(0)\n"
            "except OSError: sys.exit(1)\n"
        )
        words = (*self.inside(host), sys.executable, "-c", script, address(machine))
        return subprocess.run(words, capture_output=True, check=False).returncode == 0


def _address(end: str, machine: int, *inside: str) -> None:
    run(*inside, "ip", "addr", "add", f"{address(machine)}/{_BITS}", "dev", end)
    run(*inside, "ip", "link", "set", end, "up")


class ApartCluster(LinkedCluster):
    """Its hosts' processes run in namespaces; only NATS is behind links of ours."""

    def __init__(
        self, folder: Path, links: Links, catalog: str, model: Path, network: Network
    ) -> None:
        self.network = network
        super().__init__(folder, links, catalog, model)

    @override
    def prefix(self, host: int) -> tuple[str, ...]:
        return self.network.inside(host)

    @override
    def http_url(self, host: int, port: int) -> str:
        return f"http://{address(1 + host)}:{port}"

    @override
    def reaches(self, name: str, host: int) -> dict[str, object]:
        if name not in self.to_nats:
            self.to_nats[name] = self.links.add(
                ("127.0.0.1", self.nats.port), address(0)
            )
        return {
            "nats": f"nats://{address(0)}:{self.to_nats[name].port}",
            "listen": address(1 + host),
            "transfer_port": twin_port(),
        }


class ApartSite(ChaosSite):
    """The same system as in other rounds, on two hosts that a network joins."""

    network: Network
    postgres_host = address(0)

    @override
    def made_cluster(self, catalog: str) -> LinkedCluster:
        folder = self.folder / "c"
        return ApartCluster(
            folder, self.links, catalog, self.model_folder, self.network
        )

    @override
    def prepare(self) -> None:
        self.network = Network(self.stack)

    @override
    def undo(self) -> None:
        self.network.heal()
        super().undo()
