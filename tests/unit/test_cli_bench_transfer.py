"""``kvtide bench transfer``: what is chosen, and what comes out."""

import io
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from kvtide.cli.commands.bench_transfer import bench_transfer, choose
from kvtide.cli.sizes import parse_size
from kvtide.runtime import ConfigError
from kvtide.transfer import Operation, Refused
from kvtide.transfer.bench import SIZES, USUAL
from kvtide.transfer.verbs import device_names


def test_what_is_not_named_is_as_usual() -> None:
    choice = choose((), (), (), rounds=1, seconds=1)
    assert (choice.sizes, choice.transports) == (SIZES, USUAL)
    assert choice.operations == tuple(Operation)
    chosen = choose(("64KiB",), ("file",), ("write",), rounds=1, seconds=1)
    assert (chosen.sizes, chosen.transports) == ((65536,), ("file",))
    assert chosen.operations == (Operation.WRITE,)


@pytest.mark.parametrize(
    ("sizes", "transports", "operations", "key"),
    [
        (("4Q",), (), (), "size"),
        (("1GiB",), (), (), "size"),
        ((), ("pigeon",), (), "transport"),
        ((), (), ("erase",), "operation"),
    ],
)
def test_what_is_wrong_is_named(
    sizes: tuple[str, ...],
    transports: tuple[str, ...],
    operations: tuple[str, ...],
    key: str,
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(sizes, transports, operations, rounds=1, seconds=1)
    assert caught.value.key == key


def test_sizes_are_read() -> None:
    assert [parse_size(text) for text in ("4096", "64KiB", "1 MiB")] == [
        4096,
        65536,
        1 << 20,
    ]


def test_table_json_and_plot_are_kept(tmp_path: Path) -> None:
    shown = io.StringIO()
    bench_transfer(
        choose(("4096",), ("file",), ("read",), rounds=1, seconds=0.005),
        out=tmp_path,
        as_text=True,
        console=Console(file=shown, width=120),
    )
    report = json.loads((tmp_path / "transfer.json").read_text())
    names = [figure["name"] for figure in report["figures"]]
    assert "file read 4 KiB x8" in names
    assert "bare socket 4 KiB round trip" in names
    assert not any("write" in name for name in names)
    assert report["machine"]["cores"] >= 1
    table = (tmp_path / "transfer.md").read_text()
    for name in names:
        assert name in table
        assert name in shown.getvalue()
    plot = ET.fromstring((tmp_path / "transfer.svg").read_text())  # noqa: S314 - ours
    labels = {each.text for each in plot.iter() if each.text}
    assert {"file read", "file read x8", "4 KiB"} <= labels


def test_rdma_without_a_device_is_refused() -> None:
    try:
        there = bool(device_names())
    except Refused:
        there = False
    if there:
        pytest.skip("there is one")
    choice = choose((), ("rdma",), (), rounds=1, seconds=1)
    with pytest.raises(Refused, match="RDMA"):
        bench_transfer(choice, out=None, as_text=False, console=Console())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("bench", "http://127.0.0.1:1"), "no kvtide answers at 127.0.0.1:1"),
        (("bench", "--rounds", "0"), "--rounds"),
        (("bench", "transfer", "--transport", "pigeon"), "'pigeon' is none of shm"),
    ],
)
def test_both_benches_are_commands(words: tuple[str, ...], said: str) -> None:
    done = subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-m", "kvtide.cli", *words],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode != 0
    assert said in done.stderr
