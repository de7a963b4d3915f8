"""Two pretended hosts with one of each role, and a link of ours between every pair.

Each role reaches NATS over a link of its own, others reach its transfer port over
another, all reach PostgreSQL over a third kind, and clients reach a gateway over a
fourth. Each host has a file system in memory and a disk of its own, so that either can
be full or fail alone.
"""

import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import msgspec
from tests.chaos.link import CLEAR, Link, Links
from tests.chaos.model import chaos_model
from tests.e2e.system import Client, Site, alive, wait_for
from tests.integration.cluster import Cluster, RoleProcess
from tests.integration.postgres import PostgresServer, postgres_server
from typing_extensions import override

from kvtide.bus.messages import StatusQuery
from kvtide.cli.access import NoConductorError, NoNatsError, ask_conductor, open_bus
from kvtide.runtime.settings import RoleSettings

HOSTS = 2
MEMORY_MIB = 256
DRAM_BYTES = 16 << 20
SLAB_BYTES = 4 << 20
"""Room for some twenty blocks on each host: less than the load's prompts have."""
SSD_BYTES = 256 << 20
DISK_MIB = 320
CLIENT_STALL_S = 10.0
"""A client that takes nothing for so long, to twice that, is cut off."""
TRANSFER_HOST = "127.0.1.1"
"""Where links to transfer ports listen; the ports themselves are on 127.0.0.1."""
TWIN_PORTS = range(20_000, 32_000)
FAILING_FS = Path(__file__).parents[1] / "integration" / "failing_fs.py"
READY_LIMIT_S = 150.0
STATUS_LIMIT_S = 30.0
ROLES = ("store", "conductor", "prefill", "decode", "gateway")


class NoMountsError(Exception):
    """This machine or user can't mount file systems."""


def twin_port() -> int:
    """A port that is free here and where links to it listen.

    Of those that no connection is given by itself: it stays free while a role is dead.
    """
    for port in random.SystemRandom().sample(TWIN_PORTS, 200):
        with socket.socket() as here, socket.socket() as there:
            try:
                here.bind(("127.0.0.1", port))
                there.bind((TRANSFER_HOST, port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


async def asked_status(settings: RoleSettings) -> dict[str, Any]:
    async with open_bus(settings) as bus:
        return json.loads(msgspec.json.encode(await ask_conductor(bus, StatusQuery())))


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    if done.returncode:
        raise NoMountsError(f"{' '.join(command)}: {done.stderr.decode()}")


class LinkedCluster(Cluster):
    """A cluster whose every connection between hosts goes over a link."""

    def __init__(self, folder: Path, links: Links, catalog: str, model: Path) -> None:
        self.links = links
        self.to_nats: dict[str, Link] = {}
        self.to_transfer: dict[str, Link] = {}
        self.to_gateway: dict[str, Link] = {}
        self.catalog = catalog
        worker = {"model": str(model), "threads": 1}
        super().__init__(
            folder,
            stores=HOSTS,
            conductors=HOSTS,
            prefill=HOSTS,
            decode=HOSTS,
            gateways=HOSTS,
            hosts=HOSTS,
            settings={
                "prefill": worker,
                "decode": worker,
                "gateway": {
                    "model": str(model),
                    "drain_s": 5.0,
                    "client_stall_s": CLIENT_STALL_S,
                },
                "store": {
                    "dram_bytes": DRAM_BYTES,
                    "slab_bytes": SLAB_BYTES,
                    "ssd_bytes": SSD_BYTES,
                },
            },
        )

    def memory(self, host: int) -> Path:
        """Where a host's file system in memory is mounted."""
        return self.folder / f"memory-{host}"

    def disk(self, host: int) -> Path:
        """Where a host's disk is mounted."""
        return self.folder / f"disk-{host}"

    @override
    def shm_dir(self, host: int = 0) -> Path:
        return self.memory(host) / "shm"

    @override
    def add(self, role: str, number: int, **settings: object) -> RoleProcess:
        name = f"{role}-{number}"
        own = {"catalog": self.catalog, **self.reaches(name, number)}
        if role == "store":
            own["ssd_dir"] = str(self.disk(number) / "blocks")
        process = super().add(role, number, **{**own, **settings})
        if role == "gateway" and name not in self.to_gateway:
            host, _, port = process.http_url.removeprefix("http://").partition(":")
            self.to_gateway[name] = self.links.add((host, int(port)))
        return process

    def reaches(self, name: str, host: int) -> dict[str, object]:
        """Settings by which a role reaches others and they reach it: all over links."""
        del host
        if name not in self.to_nats:
            self.to_nats[name] = self.links.add(("127.0.0.1", self.nats.port))
            port = twin_port()
            self.to_transfer[name] = self.links.add(
                ("127.0.0.1", port), TRANSFER_HOST, port
            )
        return {
            "nats": f"nats://127.0.0.1:{self.to_nats[name].port}",
            "transfer_port": self.to_transfer[name].port,
            "advertise": TRANSFER_HOST,
        }

    @property
    def all_links(self) -> list[Link]:
        by_kind = (self.to_nats, self.to_transfer, self.to_gateway)
        return [link for kind in by_kind for link in kind.values()]


class ChaosSite(Site):
    """The running system, what breaks it, and what must hold when all is over."""

    postgres_host = "127.0.0.1"
    """Where the hosts reach the link to PostgreSQL."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stack = ExitStack()
        self.cluster: LinkedCluster
        self.model_folder: Path
        self.links: Links
        self.postgres: PostgresServer
        self.to_postgres: Link
        self.gateways: list[Client] = []

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or shutil.which("mount") is None:
            raise NoMountsError("mounting needs root and mount")
        self.folder.mkdir(parents=True)
        try:
            self._start()
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stack.close()

    def _start(self) -> None:
        stack = self.stack
        self.prepare()
        self.links = stack.enter_context(Links())
        self.postgres = stack.enter_context(postgres_server())
        url = asyncio.run(self.postgres.create_database())
        assert self.postgres.folder is not None, "a server of our own is killed here"
        self.to_postgres = self.links.add(
            self.postgres.folder / ".s.PGSQL.5432", self.postgres_host
        )
        name = url.partition("?")[0].rpartition("/")[2]
        at = f"{self.postgres_host}:{self.to_postgres.port}"
        catalog = f"postgresql+asyncpg://postgres@{at}/{name}"
        self.model_folder = chaos_model(self.folder / "model")
        self.cluster = self.made_cluster(catalog)
        for host in range(HOSTS):
            self._mount(host)
        stack.enter_context(self.cluster)
        self.cluster.wait_ready(READY_LIMIT_S)
        for number in range(HOSTS):
            link = self.cluster.to_gateway[f"gateway-{number}"]
            client = Client(f"http://127.0.0.1:{link.port}")
            stack.callback(client.close)
            assert client.model
            self.gateways.append(client)
        super().__init__(self.cluster["gateway-0"].http_url)
        stack.callback(self.close)

    def prepare(self) -> None:
        """What must be there before anything else."""

    def made_cluster(self, catalog: str) -> LinkedCluster:
        """The processes, before any is started."""
        return LinkedCluster(self.folder / "c", self.links, catalog, self.model_folder)

    def _mount(self, host: int) -> None:
        memory, disk = self.cluster.memory(host), self.cluster.disk(host)
        memory.mkdir(parents=True)
        run(
            *("mount", "-t", "tmpfs", "-o", f"size={MEMORY_MIB}m", "tmpfs"), str(memory)
        )
        self.stack.callback(run, "umount", "-l", str(memory))
        behind = self.behind(host)
        for each in (disk, behind):
            each.mkdir()
        room = f"size={DISK_MIB}m"
        run("mount", "-t", "tmpfs", "-o", room, "tmpfs", str(behind))
        self.stack.callback(run, "umount", "-l", str(behind))
        process = subprocess.Popen(
            [sys.executable, str(FAILING_FS), str(disk), str(behind)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # it complains when it is unmounted
        )
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise NoMountsError("no FUSE here")

        def end() -> None:
            run("umount", "-l", str(disk))
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

        self.stack.callback(end)

    def behind(self, host: int) -> Path:
        """The folder that a host's disk shows; ``.fail`` in it makes calls fail."""
        return self.folder / f"behind-{host}"

    @property
    @override
    def address(self) -> list[str]:
        state = ["--state-dir", str(self.cluster.state_dir)]
        return ["--nats", self.cluster.nats.url, *state]

    @override
    def status(self) -> dict[str, Any]:
        """As the command says it, without a process of its own for each question.

        While the machine is busy or a conductor wakes, none may answer in time: it is
        asked again for a while.
        """
        settings = RoleSettings(
            nats=self.cluster.nats.url, state_dir=self.cluster.state_dir
        )
        deadline_s = time.monotonic() + STATUS_LIMIT_S
        while True:
            try:
                return asyncio.run(asked_status(settings))
            except (NoConductorError, NoNatsError) as error:
                if time.monotonic() > deadline_s:
                    raise AssertionError(str(error)) from error

    @override
    def fetch(self, url: str) -> str:
        """Ports that are not of transfer have no links."""
        return super().fetch(url.replace(TRANSFER_HOST, "127.0.0.1"))

    @property
    def names(self) -> list[str]:
        return [f"{role}-{number}" for role in ROLES for number in range(HOSTS)]

    def processes_alive(self) -> list[str]:
        return [n for n, p in self.cluster.processes.items() if p.alive]

    def kill(self, name: str) -> None:
        self.cluster.kill(name)

    def restart(self, name: str, environment: Mapping[str, str] | None = None) -> None:
        """Start it with the settings that it had; ``environment`` is added."""
        given = {**dict(os.environ), "OMP_NUM_THREADS": "1", **(environment or {})}
        self.cluster[name].start(given)

    def stop(self, *names: str) -> None:
        for name in names:
            self.cluster.pause(name)

    def go_on(self, *names: str) -> None:
        for name in names:
            self.cluster.resume(name)

    def ready(self) -> bool:
        return all(process.ready() for process in self.cluster.processes.values())

    def wait_whole(self) -> None:
        """Wait until every process is there, ready, and holds nothing."""
        wait_for(self.ready, READY_LIMIT_S, "every process is ready")
        wait_for(self.all_seen, READY_LIMIT_S, "a conductor hears every node", 0.5)
        self.wait_idle(*self.names)

    def all_seen(self) -> bool:
        """Each node is there, and has said its load."""
        try:
            return set(self.names) <= {
                node["beat"]["node"]["node"]
                for node in self.status()["nodes"]
                if node["beat"]["load"]
            }
        except AssertionError:
            return False

    def epochs(self) -> dict[str, int]:
        """The life of each node that a conductor sees."""
        nodes = [node["beat"]["node"] for node in self.status()["nodes"]]
        return {node["node"]: node["epoch"] for node in nodes}

    def counted(self, start: str, *words: str) -> float:
        """The sum of a metric over all processes, of samples with these words."""
        return sum(
            value
            for process in self.cluster.processes.values()
            for name, value in process.metrics().items()
            if name.startswith(start) and all(word in name for word in words)
        )

    def loads(self, role: str) -> dict[str, dict[str, Any]]:
        """What each node of a role last said of itself, by node."""
        return {
            name: load
            for name, beat in self.beats().items()
            for load in beat["load"]
            if load["t"] == role
        }

    def undo(self) -> None:
        """End whatever was begun and not ended: for a round that failed."""
        for link in (*self.cluster.all_links, self.to_postgres):
            link.set(CLEAR)
            link.rewrite, link.narrow = None, False
        for host in range(HOSTS):
            (self.behind(host) / ".fail").unlink(missing_ok=True)
            (self.behind(host) / "filler").unlink(missing_ok=True)
            (self.cluster.memory(host) / "filler").unlink(missing_ok=True)
        for name, process in self.cluster.processes.items():
            if process.alive:
                process.send(signal.SIGCONT)
            else:
                self.restart(name)
        if not alive(self.cluster.nats.pid):
            self.cluster.nats.start()
