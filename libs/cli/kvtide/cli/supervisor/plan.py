"""What ``kvtide up`` runs: each process's command, environment and place in the order."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtide.cli.nats_keys import Keys, node_flags
from kvtide.cli.settings import UpSettings, own_command, process_environment
from kvtide.cli.supervisor.addresses import free_ports
from kvtide.cli.supervisor.children import ProcessSpec
from kvtide.cli.supervisor.model import PreparedModel
from kvtide.cli.supervisor.nats_server import find_nats_server
from kvtide.cli.supervisor.readiness import GreetingProbe, HttpProbe

LOOPBACK = "127.0.0.1"

# the bus first; then all at once, for each role waits for those that it needs
BUS_STAGE, ROLE_STAGE = 0, 1
STOP_STAGES = {
    "gateway": 1,
    "prefill": 2,
    "decode": 2,
    "worker": 2,
    "conductor": 3,
    "store": 4,
    "nats": 5,
}
"""Doors first, then who works, then what they stand on."""

DRAIN_S = 4.0
"""Who stops a whole system does not wait long for its open requests."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What all processes of one run share.

    ``nats_url`` may hold a token, so it goes by environment and never by flag.
    """

    shm_dir: Path
    model: PreparedModel
    nats_url: str
    nats_config: Path | None
    nats_port: int
    config: Path | None
    keys: Keys | None = None


def nats_spec(ground: Ground) -> ProcessSpec:
    """The embedded server.

    Raises:
        ConfigError: its binary is not installed.
    """
    return ProcessSpec(
        name="nats",
        argv=(str(find_nats_server()), "--config", str(ground.nats_config)),
        environment=process_environment({}),
        probe=GreetingProbe(LOOPBACK, ground.nats_port),
        start_stage=BUS_STAGE,
        stop_stage=STOP_STAGES["nats"],
        address=f"{LOOPBACK}:{ground.nats_port}",
    )


def role_specs(settings: UpSettings, ground: Ground) -> Iterator[ProcessSpec]:
    """Every role, as many times as the settings say."""
    nodes = list(nodes_of(settings))
    ports = free_ports(len(nodes))
    for (role, name), port in zip(nodes, ports, strict=True):
        yield _role_spec(settings, ground, role, name, port)


def nodes_of(settings: UpSettings) -> Iterator[tuple[str, str]]:
    """The role and name of each."""
    counts = {
        "store": 1,
        "conductor": settings.conductors,
        "prefill": settings.prefill,
        "decode": settings.decode,
        "worker": settings.worker,
        "gateway": 1,
    }
    for role, count in counts.items():
        for number in range(count):
            yield role, f"{role}-{number}"


def _role_spec(
    settings: UpSettings, ground: Ground, role: str, name: str, port: int
) -> ProcessSpec:
    host = LOOPBACK
    flags = {
        "node": name,
        "cluster": settings.cluster,
        "state-dir": str(settings.state_dir),
        "shm-dir": str(ground.shm_dir),
        "log-level": settings.log_level,
        "http-port": str(port),
        **({"otlp": settings.otlp} if settings.otlp else {}),
        **node_flags(ground.keys, name),
        **_own_flags(settings, ground, role),
    }
    if role == "gateway":
        host, port = settings.host, settings.port
    if ground.config is not None:
        flags["config"] = str(ground.config)
    words = [word for key, value in flags.items() for word in (f"--{key}", value)]
    return ProcessSpec(
        name=name,
        argv=(*own_command(), role, *words),
        environment=process_environment(_variables(settings, ground, role)),
        probe=HttpProbe(_reachable(host), port),
        start_stage=ROLE_STAGE,
        stop_stage=STOP_STAGES[role],
        address=f"{host}:{port}",
    )


def _own_flags(settings: UpSettings, ground: Ground, role: str) -> Mapping[str, str]:
    """What one role needs more than all do."""
    if role in ("prefill", "decode", "worker"):
        return {
            "model": ground.model.source,
            "cache-dir": str(settings.cache_dir),
            "threads": str(settings.threads),
            "dtype": settings.dtype,
            "device": settings.device,
            "drain-s": str(DRAIN_S),
        }
    if role == "store":
        own = {"ssd-bytes": str(int(settings.ssd))}
        return own | ({"dram-bytes": str(int(settings.dram))} if settings.dram else {})
    if role == "gateway":
        return {
            "model": str(ground.model.folder),
            "model-name": ground.model.name,
            "listen": settings.host,
            "http-port": str(settings.port),
            "drain-s": str(DRAIN_S),
        }
    return {}


def _variables(settings: UpSettings, ground: Ground, role: str) -> Mapping[str, str]:
    """Secrets, and what libraries read before they are imported."""
    variables = {
        f"KVTIDE_{role.upper()}_NATS": ground.nats_url,
        f"KVTIDE_{role.upper()}_CATALOG": settings.catalog,
        # threads that wait must not spin: on few cores spinning costs ten times
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if role == "worker":
        for part in ("PREFILL", "DECODE"):
            variables[f"KVTIDE_{part}_NATS"] = ground.nats_url
            variables[f"KVTIDE_{part}_CATALOG"] = settings.catalog
        del variables["KVTIDE_WORKER_NATS"], variables["KVTIDE_WORKER_CATALOG"]
    if settings.threads and role in ("prefill", "decode", "worker"):
        variables["OMP_NUM_THREADS"] = str(settings.threads)
    return variables


def _reachable(host: str) -> str:
    """Where to ask what listens on ``host``."""
    return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
