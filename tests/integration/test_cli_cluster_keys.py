"""Keys for a cluster of hosts: each gets its own, and a real server takes them."""

import stat
from pathlib import Path

import pytest
from cryptography import x509
from tests.integration.nats_server import NatsServer

from kvtide.bus import (
    Hop,
    Identity,
    NatsBus,
    NatsPass,
    Subjects,
    load_secret,
    transfer_tls,
)
from kvtide.bus.errors import BusError, Disconnected
from kvtide.bus.limits import BusLimits
from kvtide.bus.messages import Ack, Goodbye
from kvtide.cli.cluster_keys import ClusterSpec, Host, make_cluster_keys
from kvtide.kv import NodeId, NodeRef, Role
from kvtide.runtime import ConfigError, SystemClock
from kvtide.runtime.settings import load_settings
from kvtide.store.key_encryption import load_kek
from kvtide.store.settings import StoreSettings
from kvtide.transfer import Endpoint, Refused

LIMITS = BusLimits(drain_timeout_s=0.1, connect_timeout_s=2.0)
HOSTS = (
    "front.example=gateway:gw-0,conductor:cond-0",
    "10.0.0.7=store:store-7,decode:decode-7",
    "10.0.0.8=store:store-8,worker:both-8",
)


def spec(at: Path, *hosts: str) -> ClusterSpec:
    parsed = tuple(map(Host.parse, hosts or HOSTS))
    return ClusterSpec("prod", ("127.0.0.1", "nats.example"), parsed, at)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_each_host_gets_its_own_and_no_more(tmp_path: Path) -> None:
    made = make_cluster_keys(tmp_path, spec(Path("/etc/kvtide")))
    there = contents(tmp_path)
    assert [path.name for path in made] == ["front.example", "10.0.0.7", "10.0.0.8"]
    own = {path.name: set(contents(path)) for path in made}
    common = {"ca.pem", "secret", "host.pem", "host.key"}
    assert own["10.0.0.7"] == common | {
        "ssd.key",
        "store-7.seed",
        "store-7.toml",
        "decode-7.seed",
        "decode-7.toml",
    }
    assert "ssd.key" not in own["front.example"]
    for name, content in there.items():
        path = tmp_path / name
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        if name.endswith(".seed") and "hosts" in name:
            # a node's key is on its own host, and where all are made
            holders = {other for other, text in there.items() if text == content}
            assert holders == {name, f"authority/nkeys/{path.name}"}
    assert there["hosts/10.0.0.7/secret"] == there["hosts/10.0.0.8/secret"]
    certificate = x509.load_pem_x509_certificate(there["hosts/10.0.0.7/host.pem"])
    names = certificate.extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    ).value
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == [
        "10.0.0.7"
    ]


def test_what_is_there_is_kept_when_a_host_is_added(tmp_path: Path) -> None:
    make_cluster_keys(tmp_path, spec(tmp_path))
    before = contents(tmp_path)
    make_cluster_keys(tmp_path, spec(tmp_path, *HOSTS, "h9=prefill:p-9"))
    after = contents(tmp_path)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"nats/access.conf"}
    assert "hosts/h9/p-9.toml" in after


def test_the_settings_name_what_is_there(tmp_path: Path) -> None:
    home = tmp_path / "hosts" / "10.0.0.7"
    make_cluster_keys(tmp_path, spec(home))
    settings, _ = load_settings(
        StoreSettings, "store", environ={}, toml_path=home / "store-7.toml"
    )
    assert (settings.node, settings.cluster) == ("store-7", "prod")
    assert settings.nats == "tls://127.0.0.1:4222,tls://nats.example:4222"
    for key in StoreSettings.model_fields:
        if key.endswith("_file") and (path := getattr(settings, key)) is not None:
            assert path.exists(), key
    assert load_kek(settings) is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "=store:s",
        "h=store",
        "h=store:",
        "h=baker:b",
        "h=store:a b",
        "a/b=store:s",
    ],
)
def test_what_is_no_host_is_said(text: str) -> None:
    with pytest.raises(ConfigError):
        Host.parse(text)


def test_a_name_is_used_once(tmp_path: Path) -> None:
    for hosts in (
        ("a=store:s", "b=store:s"),
        ("a=store:s", "a=store:t"),
        ("a=store:operator",),
    ):
        with pytest.raises(ConfigError, match="named twice"):
            make_cluster_keys(tmp_path, spec(tmp_path, *hosts))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
async def test_a_real_server_takes_the_nodes_and_their_ports_speak_tls(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "keys"
    make_cluster_keys(folder, spec(folder / "nats"))
    config = folder / "nats" / "nats.conf"
    config.write_text(config.read_text().replace("0.0.0.0:4222", "127.0.0.1:-1"))
    server = NatsServer(tmp_path, f"--config={config}")
    server.start()
    try:
        await speak(folder, f"tls://127.0.0.1:{server.port}")
    finally:
        server.stop()


async def speak(folder: Path, url: str) -> None:
    store = folder / "hosts" / "10.0.0.7"
    subjects = Subjects("prod")
    identity = Identity(NodeId("store-7"), 1)
    bus = await NatsBus.open(
        url,
        identity,
        cluster="prod",
        clock=SystemClock(),
        entry=NatsPass(store / "store-7.seed", store / "ca.pem"),
        limits=LIMITS,
    )
    async with bus:
        ref = NodeRef(NodeId("store-7"), 1)
        await bus.publish(subjects.goodbye(NodeId("store-7")), Goodbye(node=ref))
        with pytest.raises((BusError, Disconnected)):
            await bus.request(
                subjects.inbox(Role.CONDUCTOR, NodeId("cond-0"), Hop.ADMIT),
                Ack(),
                timeout_s=0.5,
            )


def end_of(home: Path, name: str) -> Endpoint:
    settings, _ = load_settings(
        StoreSettings, "store", environ={}, toml_path=home / f"{name}.toml"
    )
    return Endpoint(
        node=name,
        epoch=1,
        secret=load_secret(home / "secret"),
        clock=SystemClock(),
        shm_dir=None,
        tls=transfer_tls(settings),
    )


async def test_only_hosts_of_one_authority_connect(tmp_path: Path) -> None:
    for cluster in ("ours", "theirs"):
        home = tmp_path / cluster / "hosts" / "h"
        make_cluster_keys(tmp_path / cluster, spec(home, "h=store:one,store:two"))
    ours, theirs = (tmp_path / name / "hosts" / "h" for name in ("ours", "theirs"))
    async with end_of(ours, "one") as one, end_of(ours, "two") as two:
        await two.connect(one.address)
        # even one that knows the secret
        (theirs / "secret").write_bytes((ours / "secret").read_bytes())
        async with end_of(theirs, "two") as other:
            with pytest.raises(Refused, match="TLS"):
                await other.connect(one.address)


def test_half_of_the_files_for_tls_are_no_tls(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="all of them"):
        transfer_tls(StoreSettings(transfer_ca_file=tmp_path))
    assert transfer_tls(StoreSettings()) is None
