"""The search for keys in what git tracks: it finds planted ones, and none here."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kvtide.catalog import make_key

ROOT = Path(__file__).resolve().parents[2]
PLANTED = {
    "a.pem": "-----BEGIN EC PRIVATE " + "KEY-----\n",
    "seed.txt": "SU" + "A" * 56,
    "cloud.py": "key = 'AKIA" + "B" * 16 + "'",
    "token.txt": "ghp_" + "c" * 36,
    "url.toml": 'catalog = "postgresql://user:' + "longpassword1@host/db" + '"',
    "ours.txt": make_key().text,
    "node-1.seed": "anything",
    "deploy/secret": "0" * 64,
}


def search(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - our own script
        [folder / "ops" / "audit.sh", "secrets"],
        check=False,
        capture_output=True,
        text=True,
    )


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)  # noqa: S603, S607


def test_there_is_no_key_in_the_tree() -> None:
    done = search(ROOT)
    assert done.stdout.splitlines()[:-1] == []
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("clone")
    (made / "ops").mkdir()
    shutil.copy(ROOT / "ops" / "audit.sh", made / "ops")
    git(made, "init", "-q")
    git(made, "add", ".")
    return made


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_key_is_found(clone: Path, name: str) -> None:
    assert search(clone).returncode == 0
    path = clone / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(PLANTED[name])
    git(clone, "add", name)
    try:
        done = search(clone)
        assert done.returncode == 1
        assert name in done.stdout
    finally:
        git(clone, "rm", "-q", "-f", name)
