"""The command line: quick help, clear errors, values with their origins."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtide.cli.exits import BAD_SETTINGS, TEMPORARY, exit_code
from kvtide.runtime import ConfigError, KvtideError


def kvtide(
    *words: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-m", "kvtide.cli", *words],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "COLUMNS": "200", **(env or {})},  # noqa: S108
    )


def test_help_lists_every_command_and_loads_nothing_heavy() -> None:
    probe = (
        "import sys; sys.argv = ['kvtide', '--help']\n"
        "from kvtide.cli.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'nats', 'pydantic_core', 'fastapi', 'sqlalchemy',"
        " 'transformers', 'numpy'}\n"
        "print('loaded', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    )
    assert "loaded []" in done.stdout
    for name in (
        "up", "gateway", "conductor", "prefill", "decode", "store", "worker", "config",
        "status", "explain", "doctor", "version", "health", "bus", "fetch-model",
    ):  # fmt: skip
        assert f" {name} " in done.stdout


def test_settings_of_all_roles_load_no_torch() -> None:
    probe = (
        "import sys\nfrom kvtide.cli.roles import schemas\nschemas()\n"
        "print('loaded', sorted({'torch', 'transformers', 'fastapi', 'sqlalchemy'}"
        " & set(sys.modules)))\n"
    )
    done = subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "loaded []"


def test_a_role_has_a_flag_for_each_setting() -> None:
    done = kvtide("store", "--help")
    assert done.returncode == 0
    for words in ("--dram-bytes", "--nats", "--catalog", "--state-dir", "--config"):
        assert words in done.stdout
    assert "PydanticUndefined" not in kvtide("gateway", "--help").stdout


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (
            ("prefill", "--threads", "many"),
            {},
            "threads: input should be a valid integer",
        ),
        (("store", "--log-level", "loud"), {}, "from flag --log-level"),
        (("store",), {"KVTIDE_STORE_DRAMBYTES": "1"}, "KVTIDE_STORE_DRAM_BYTES"),
        (("worker", "--roles", "prefil"), {}, "did you mean prefill"),
        (
            ("store", "--config", "/nonexistent.toml"),
            {},
            "can't read the settings file",
        ),
        (("up", "--prefill", "0"), {}, "no worker would do prefill"),
        (("up", "--model", "no such"), {}, "no such folder"),
        (("config", "gatway"), {}, "did you mean gateway"),
    ],
)
def test_wrong_settings_are_one_clear_line_and_code_2(
    tmp_path: Path, words: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    done = kvtide(*words, env={"KVTIDE_STATE_DIR": str(tmp_path), **env})
    assert done.returncode == BAD_SETTINGS
    assert said in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_an_unknown_flag_is_refused() -> None:
    done = kvtide("store", "--drambytes", "5")
    assert done.returncode == 2
    assert "--dram" in done.stderr


def test_config_tells_values_and_origins_and_hides_secrets(tmp_path: Path) -> None:
    toml = tmp_path / "kvtide.toml"
    toml.write_text(
        "[common]\ncatalog = 'postgresql://u:hunter2@h/d'\n[gateway]\nmodel = '/m'\n"
    )
    done = kvtide(
        "config",
        "--json",
        "--config",
        str(toml),
        env={"KVTIDE_STORE_SLAB_BYTES": "8192"},
    )
    assert done.returncode == 0
    assert "hunter2" not in done.stdout
    shown = json.loads(done.stdout)
    assert shown["store"]["slab_bytes"] == {
        "value": "8192",
        "from": "environment KVTIDE_STORE_SLAB_BYTES",
    }
    assert shown["decode"]["catalog"] == {
        "value": "postgresql://u:********@h/d",
        "from": f"file {toml} [common]",
    }
    assert shown["up"]["port"] == {"value": "8000", "from": "default"}


def test_version_is_printed() -> None:
    done = kvtide("version")
    assert done.returncode == 0
    assert done.stdout.startswith("kvtide ")


def test_errors_become_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console  # noqa: PLC0415

    def raises(error: BaseException) -> int:
        def work() -> int:
            raise error

        return exit_code(work, Console())

    assert exit_code(lambda: 0, Console()) == 0
    assert raises(ConfigError("bad")) == BAD_SETTINGS
    assert raises(KvtideError("[later]")) == TEMPORARY
    assert raises(OSError(5, "disk")) == TEMPORARY
    assert "error: [later]" in capsys.readouterr().out
