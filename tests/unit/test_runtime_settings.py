"""Where settings come from, in which order, and how a wrong one is told."""

from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from kvtide.runtime import ConfigError
from kvtide.runtime.settings import RoleSettings, hide_passwords, load_settings, shown


class Limits(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    body_bytes: int = 1000


class DoorSettings(RoleSettings):
    port: int = Field(default=8000, ge=0, le=65535)
    allowed: tuple[str, ...] = ()
    salt: SecretStr = SecretStr("")
    limits: Limits = Limits()


class EngineSettings(RoleSettings):
    threads: int = 1


SCHEMAS: dict[str, type[BaseModel]] = {"door": DoorSettings, "engine": EngineSettings}


def load(
    environ: dict[str, str] | None = None,
    toml: Path | None = None,
    flags: dict[str, object] | None = None,
) -> tuple[DoorSettings, dict[str, str]]:
    settings, origins = load_settings(
        DoorSettings,
        "door",
        flags=flags,
        environ=environ or {},
        toml_path=toml,
        schemas=SCHEMAS,
    )
    return settings, {key: str(origin) for key, origin in origins.items()}


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvtide.toml"
    path.write_text(text)
    return path


def test_each_source_beats_the_next_one(tmp_path: Path) -> None:
    toml = written(
        tmp_path,
        "[common]\nport = 1\nnats = 'nats://file:1'\nlog_level = 'error'\n"
        "[door]\nport = 2\n",
    )
    environ = {"KVTIDE_PORT": "3", "KVTIDE_DOOR_PORT": "4", "KVTIDE_NATS": "nats://e:1"}
    flags: dict[str, object] = {"port": 5, "nats": None}
    settings, origins = load(environ, toml, flags)
    assert settings.port == 5
    assert origins["port"] == "flag --port"
    assert settings.nats == "nats://e:1"
    assert origins["nats"] == "environment KVTIDE_NATS"
    assert settings.log_level == "error"
    assert origins["log_level"] == f"file {toml} [common]"
    assert origins["cluster"] == "default"
    settings, origins = load(environ, toml)
    assert (settings.port, origins["port"]) == (4, "environment KVTIDE_DOOR_PORT")
    settings, origins = load({"KVTIDE_PORT": "3"}, toml)
    assert (settings.port, origins["port"]) == (3, "environment KVTIDE_PORT")
    settings, origins = load({}, toml)
    assert (settings.port, origins["port"]) == (2, f"file {toml} [door]")


def test_settings_of_other_roles_are_known_but_not_taken(tmp_path: Path) -> None:
    toml = written(tmp_path, "[engine]\nthreads = 3\n[common]\nthreads = 4\n")
    environ = {"KVTIDE_ENGINE_THREADS": "2", "KVTIDE_TEST_ANYTHING": "x", "HOME": "/"}
    settings, _ = load(environ, toml)
    assert settings == DoorSettings()


@pytest.mark.parametrize(
    ("environ", "toml", "flags", "key", "words"),
    [
        ({"KVTIDE_PROT": "1"}, "", {}, "KVTIDE_PROT", "did you mean KVTIDE_PORT"),
        (
            {"KVTIDE_DOOR_THREADS": "1"},
            "",
            {},
            "KVTIDE_DOOR_THREADS",
            "names no setting",
        ),
        ({}, "[door]\nprt = 1", {}, "door.prt", "did you mean port"),
        ({}, "[dor]\nport = 1", {}, "dor", "did you mean door"),
        ({}, "port = 1", {}, "port", "outside of a table"),
        ({}, "[common]\nprot = 1", {}, "common.prot", "did you mean port"),
        ({}, "[door", {}, None, "no valid TOML"),
        ({}, "", {"prot": 1}, "prot", "did you mean port"),
        ({"KVTIDE_PORT": "many"}, "", {}, "port", "got 'many' from environment"),
        ({"KVTIDE_PORT": "70000"}, "", {}, "port", "less than or equal to 65535"),
        ({}, "[door]\nport = 'x'", {}, "port", "[door]"),
        ({}, "[door.limits]\nbody_byte = 1", {}, "limits.body_byte", "no such setting"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path,
    environ: dict[str, str],
    toml: str,
    flags: dict[str, object],
    key: str | None,
    words: str,
) -> None:
    path = written(tmp_path, toml) if toml else None
    with pytest.raises(ConfigError) as caught:
        load(environ, path, flags)
    assert words in str(caught.value)
    if key is not None:
        assert caught.value.key == key
        assert key in str(caught.value) or key.split(".")[-1] in str(caught.value)


def test_a_wrong_secret_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags={"salt": 5, "port": "http://u:hunter2@x"})
    assert "hunter2" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml"):
        load({"KVTIDE_CONFIG": str(tmp_path / "nothing.toml")})


def test_text_becomes_collections_none_and_nested_settings() -> None:
    settings, _ = load(
        {
            "KVTIDE_ALLOWED": "a, b",
            "KVTIDE_SECRET_FILE": "",
            "KVTIDE_LIMITS": '{"body_bytes": 5}',
        }
    )
    assert settings.allowed == ("a", "b")
    assert settings.secret_file is None
    assert settings.limits.body_bytes == 5
    settings, _ = load({"KVTIDE_ALLOWED": '["a,b"]'})
    assert settings.allowed == ("a,b",)


def test_home_is_expanded_in_paths_also_in_defaults() -> None:
    settings, _ = load({"KVTIDE_SECRET_FILE": "~/x"})
    assert settings.state_dir == Path.home() / ".kvtide"
    assert settings.secret_file == Path.home() / "x"


def test_shown_hides_secrets_and_passwords() -> None:
    assert shown("salt", SecretStr("abc")) == "********"
    assert shown("api_key", "abc") == "********"
    assert shown("secret_file", Path("/x")) == "/x"
    assert shown("block_tokens", 64) == "64"
    assert hide_passwords("a nats://u:p@h:1 b") == "a nats://u:********@h:1 b"
    assert hide_passwords("nats://token@h:1") == "nats://********@h:1"
    assert hide_passwords("postgresql://user@h/d") == "postgresql://user@h/d"
    assert hide_passwords("pg://u:p/w@h/d") == "pg://u:********@h/d"
    for plain in ("http://h:80/users/@me", "nats://h:1,nats://token@g:2"):
        assert hide_passwords(plain) == plain.replace("token", "********")
