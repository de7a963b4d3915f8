"""Which card is near which memory: from sysfs, from JSON, and what it is used for."""

import os
from pathlib import Path

import pytest

from kvtide.runtime import ConfigError, SystemClock
from kvtide.transfer import Endpoint, EndpointAddress
from kvtide.transfer.control import Control
from kvtide.transfer.dial import Dialer
from kvtide.transfer.nics import card_towards, hosts_here
from kvtide.transfer.topology import Near, Topology, discover, from_json, home
from kvtide.transfer.ways import Surroundings, Ways


def put(root: Path, path: str, text: str = "") -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def two_sockets(root: Path) -> None:
    for node in (0, 1):
        put(root, f"devices/system/node/node{node}/cpulist")
        put(root, f"class/infiniband/mlx5_{node}/device/numa_node", f"{node}\n")
        put(root, f"bus/pci/devices/0000:{node}1:00.0/class", "0x030200\n")
        put(root, f"bus/pci/devices/0000:{node}1:00.0/vendor", "0x10de\n")
        put(root, f"bus/pci/devices/0000:{node}1:00.0/numa_node", f"{node}\n")
    put(root, "devices/system/node/online", "0-1")
    put(root, "bus/pci/devices/0000:00:1f.0/class", "0x060100\n")


def test_discovered(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    zero = Near(("mlx5_0",), ("mlx5_1",))
    one = Near(("mlx5_1",), ("mlx5_0",))
    found = discover(tmp_path)
    assert found == Topology(
        {"cpu:0": zero, "cpu:1": one, "cuda:0": zero, "cuda:1": one}
    )
    assert found.cards("cpu:1") == ("mlx5_1", "mlx5_0")
    assert found.penalty("cpu:0", "mlx5_1") > found.penalty("cpu:0", "mlx5_0") == 1
    assert found.penalty("cpu:9", "mlx5_1") == 1
    assert found.penalties("mlx5_1").keys() == {"cpu:0", "cuda:0"}
    assert found.crosses
    assert found.lines()[0] == "cpu:0: mlx5_0; farther: mlx5_1"


def test_without_rdma_or_numa(tmp_path: Path) -> None:
    assert discover(tmp_path) == Topology({"cpu:0": Near()})
    put(tmp_path, "class/net/eth0/device/numa_node", "-1\n")
    put(tmp_path, "class/net/lo/mtu", "65536")
    assert discover(tmp_path) == Topology({"cpu:0": Near(("eth0",))})
    assert not discover(tmp_path).crosses


def test_this_machine() -> None:
    assert "cpu:0" in discover().near


def test_json_round_trip(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    found = discover(tmp_path)
    assert from_json(found.to_json()) == found


def test_network_cards_beside_rdma_devices(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    put(tmp_path, "class/net/eth1/device/numa_node", "1\n")
    found = discover(tmp_path)
    assert found.cards("cpu:1") == ("mlx5_1", "eth1", "mlx5_0")
    assert found.penalties("eth1").keys() == {"cpu:0", "cuda:0"}


def test_a_gpu_prefers_the_card_below_its_own_switch(tmp_path: Path) -> None:
    """One node, two switches, each with a GPU and a card."""
    put(tmp_path, "devices/system/node/node0/cpulist", "0-3")
    for at, bus in enumerate(("10", "20")):
        below = f"devices/pci0000:00/0000:00:0{at}.0/0000:{bus}:00.0"
        card, gpu = f"{below}/0000:{bus}:01.0", f"{below}/0000:{bus}:02.0"
        put(tmp_path, f"{card}/numa_node", "0\n")
        put(tmp_path, f"{gpu}/numa_node", "0\n")
        put(tmp_path, f"{gpu}/class", "0x030200\n")
        put(tmp_path, f"{gpu}/vendor", "0x10de\n")
        for link, target in (
            (f"class/infiniband/mlx5_{at}/device", card),
            (f"bus/pci/devices/0000:{bus}:02.0", gpu),
        ):
            (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / link).symlink_to(tmp_path / target)
    found = discover(tmp_path)
    assert found.near["cuda:0"] == Near(("mlx5_0",), ("mlx5_1",))
    assert found.near["cuda:1"] == Near(("mlx5_1",), ("mlx5_0",))
    # a node's memory is as near to both
    assert found.near["cpu:0"] == Near(("mlx5_0", "mlx5_1"))


def test_home_is_the_node_of_the_processors(tmp_path: Path) -> None:
    put(tmp_path, "devices/system/node/node0/cpulist", "0-3,8-11\n")
    put(tmp_path, "devices/system/node/node1/cpulist", "4-7\n")
    assert home(tmp_path, {8, 3}) == "cpu:0"
    assert home(tmp_path, {5}) == "cpu:1"
    assert home(tmp_path, {3, 4}) == "cpu:0"
    assert home(tmp_path / "nothing", {99}) == "cpu:0"
    assert home() in discover().near


@pytest.mark.parametrize("text", ["", "[]", '{"cpu:0": {"preferred": "mlx5_0"}}'])
def test_wrong_json(text: str) -> None:
    with pytest.raises(ConfigError, match="topology"):
        from_json(text)


# ---- what it is used for


def test_each_rail_weighs_by_its_own_card() -> None:
    """TCP: the card that leads to a host. RDMA is tested with devices."""
    clock = SystemClock()
    address = EndpointAddress("owner", 1, "10.0.0.1,10.0.0.2", 7, "", 3)
    topology = Topology(
        {"cpu:0": Near(("eth0",), ("eth1",)), "cpu:1": Near(("eth1",), ("eth0",))}
    )
    cards = {"10.0.0.1": "eth0", "10.0.0.2": "eth1"}

    control = Control(
        Dialer(address, (), "reader", 1, bytes(32), clock),
        region_gone=lambda _: None,
        ways=lambda _: None,
        peer_gone=lambda _: None,
    )

    def penalties(hosts: tuple[str, ...], topology: Topology) -> dict[str, object]:
        dialer = Dialer(address, hosts, "reader", 1, bytes(32), clock)
        here = Surroundings(topology, 1, clock, cards.__getitem__)
        rails = Ways(dialer, here, control, ()).rails(0)
        return {rail.name: dict(rail.penalties) for rail, _ in rails}

    assert penalties(tuple(cards), topology) == {
        "10.0.0.1#0": {"cpu:1": 1.5},
        "10.0.0.2#0": {"cpu:0": 1.5},
    }
    # with one way there is nothing to choose, and with one node nothing to weigh
    assert penalties(("10.0.0.2",), topology) == {"10.0.0.2#0": {}}
    assert penalties(tuple(cards), Topology({"cpu:0": Near(("eth0",))})) == {
        "10.0.0.1#0": {},
        "10.0.0.2#0": {},
    }


def test_memory_lies_where_its_region_says() -> None:
    endpoint = Endpoint(
        node="a",
        epoch=1,
        secret=b"the secret of this test's cluster",
        clock=SystemClock(),
        shm_dir=None,
        topology=Topology({"cpu:0": Near(("x",), ("y",))}),
        location="cpu:7",
    )
    far = endpoint.allocate(8192, name="far", location="cpu:1")
    other = memoryview(bytearray(100))
    assert endpoint.location_of([far.view[4096:]]) == "cpu:1"
    assert endpoint.location_of([memoryview(b""), far.view[8191:]]) == "cpu:1"
    assert endpoint.location_of([other]) == "cpu:7"
    assert endpoint.location_of([]) == "cpu:7"
    endpoint.deregister_blocking(far)
    assert endpoint.location_of([other]) == "cpu:7"
    endpoint.close_blocking()


# ---- this machine's cards


def test_the_card_towards_a_host_is_one_of_ours() -> None:
    assert card_towards("127.0.0.1") == "lo"
    assert card_towards("no such host.invalid") == ""


def test_hosts_are_addresses_of_cards_that_are_up() -> None:
    found = hosts_here()
    assert not any(host.startswith("127.") for host in found)
    for host in found:
        name = card_towards(host)
        assert name == "lo" or os.path.exists(f"/sys/class/net/{name}")  # noqa: PTH110
