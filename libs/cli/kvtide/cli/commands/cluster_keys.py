"""``kvtide cluster-keys``: what a cluster of hosts needs to trust itself alone."""

from pathlib import Path

from rich.console import Console

from kvtide.cli.cluster_keys import ClusterSpec, Host, make_cluster_keys


def write_cluster_keys(
    folder: Path,
    *,
    cluster: str,
    nats: list[str],
    hosts: list[str],
    at: Path,
    console: Console,
) -> None:
    """Make them, and say what goes where.

    Raises:
        ConfigError: something is named wrongly.
        OSError: the folder can't be written.
    """
    spec = ClusterSpec(cluster, tuple(nats), tuple(map(Host.parse, hosts)), at)
    made = make_cluster_keys(folder, spec)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(f"copy {folder / 'nats'}/* to {at} of each NATS server; start:")
    say(f"  nats-server --config {at / 'nats.conf'}")
    if len(spec.nats) > 1:
        say(
            "  each server needs a server_name of its own and a cluster block with routes "
            "to the others: without routes, nodes at different servers never meet"
        )
    for home, host in zip(made, spec.hosts, strict=True):
        say(
            f"copy {home}/* to {at} of {host.name}, for its service's user alone; start:"
        )
        for role, node in host.nodes:
            say(f"  kvtide {role} --config {at / (node + '.toml')} --listen 0.0.0.0")
    say(f"commands: copy {folder / 'operator'}/* to {at}, then")
    say(f"  kvtide status --config {at / 'operator.toml'}")
    say(
        "all roles and commands need one catalog (KVTIDE_CATALOG=postgresql://…): without, "
        "each store keeps its tenants' keys beside its own disk"
    )
    say(f"keep {folder / 'authority'} where no host is: it can add any node")
