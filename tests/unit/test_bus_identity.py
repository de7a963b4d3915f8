"""Epochs only grow; the secret is made once and for its owner only."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvtide.bus import EpochError, Identity, load_secret
from kvtide.kv import MIN_SECRET_BYTES, NodeId, NodeRef, derive_key
from kvtide.runtime import ConfigError, ManualClock

NODE = NodeId("store-0")


def test_each_life_has_a_greater_epoch(tmp_path: Path) -> None:
    clock = ManualClock(start_s=5.0)
    first = Identity.open(NODE, tmp_path, clock)
    assert first.current == NodeRef(NODE, 5000)
    second = Identity.open(NODE, tmp_path, clock)
    assert second.current.epoch == 5001
    assert second.advance() == second.current == NodeRef(NODE, 5002)
    assert Identity.open(NODE, tmp_path, clock).current.epoch == 5003


def test_a_clock_set_back_does_not_set_epochs_back(tmp_path: Path) -> None:
    late = Identity.open(NODE, tmp_path, ManualClock(start_s=9000.0))
    early = Identity.open(NODE, tmp_path, ManualClock(start_s=1.0))
    assert early.current.epoch == late.current.epoch + 1


def test_a_lost_file_is_made_good_by_the_clock(tmp_path: Path) -> None:
    before = Identity.open(NODE, tmp_path, ManualClock(start_s=5.0))
    (tmp_path / "epochs" / NODE).unlink()
    after = Identity.open(NODE, tmp_path, ManualClock(start_s=6.0))
    assert after.current.epoch > before.current.epoch


def test_nodes_keep_their_epochs_apart(tmp_path: Path) -> None:
    clock = ManualClock(start_s=5.0)
    Identity.open(NODE, tmp_path, clock)
    assert Identity.open(NodeId("other"), tmp_path, clock).current.epoch == 5000


def test_a_file_that_holds_no_number_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "epochs" / NODE
    path.parent.mkdir()
    path.write_text("not a number")
    with pytest.raises(EpochError) as caught:
        Identity.open(NODE, tmp_path, ManualClock())
    assert caught.value.path == str(path)


def test_a_folder_that_can_not_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "epochs").write_text("in the way")
    with pytest.raises(EpochError):
        Identity.open(NODE, tmp_path, ManualClock())


def test_without_a_file_epochs_grow_too() -> None:
    identity = Identity(NODE, 1)
    assert identity.advance().epoch == 2
    assert identity.advance_unkept().epoch == 3


def test_the_secret_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "state" / "secret"
    secret = load_secret(path)
    assert len(secret) == 32
    assert load_secret(path) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["secret"]


def test_all_who_start_at_once_get_the_same_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    code = (
        "import sys, pathlib; from kvtide.bus.secret import load_secret;"
        "print(load_secret(pathlib.Path(sys.argv[1])).hex())"
    )
    started = [
        subprocess.Popen(  # noqa: S603 - our own code
            [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    secrets = {process.communicate(timeout=60)[0].strip() for process in started}
    assert secrets == {path.read_text().strip()}


@pytest.mark.parametrize("text", ["", "xyz", "00ff", "ü", "0f" * 16, "0f" * 31])
def test_a_file_without_a_secret_is_an_error_that_names_the_setting(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_secret(path)
    assert caught.value.key == "secret_file"
    assert str(path) in str(caught.value)
    assert "openssl rand -hex 32" in str(caught.value)


@pytest.mark.parametrize("count", [MIN_SECRET_BYTES, MIN_SECRET_BYTES + 1])
def test_a_secret_that_is_taken_at_the_start_can_make_keys(
    tmp_path: Path, count: int
) -> None:
    path = tmp_path / "secret"
    path.write_text("0f" * count + "\n")
    assert len(derive_key(load_secret(path), "block identity 0")) == 32


def test_a_secret_that_can_not_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_secret(tmp_path)
    assert caught.value.key == "secret_file"
