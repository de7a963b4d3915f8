"""What ``kvtide up`` would start, without starting it."""

from pathlib import Path

import pytest
from rich.console import Console

from kvtide.cli.commands.up import up
from kvtide.cli.roles import ROLES, schemas
from kvtide.cli.settings import UpSettings
from kvtide.cli.supervisor.children import ProcessSpec
from kvtide.cli.supervisor.model import PreparedModel
from kvtide.cli.supervisor.plan import Ground, nats_spec, role_specs
from kvtide.runtime import ConfigError
from kvtide.runtime.settings import load_settings

NATS = "nats://hush-hush@127.0.0.1:4321"


def planned(tmp_path: Path, **changes: object) -> dict[str, ProcessSpec]:
    settings = UpSettings.model_validate({"state_dir": tmp_path, **changes})
    model = PreparedModel("owner/name", tmp_path / "folder", "owner/name")
    ground = Ground(tmp_path / "shm", model, NATS, tmp_path / "nats.conf", 4321, None)
    specs = [nats_spec(ground), *role_specs(settings, ground)]
    return {spec.name: spec for spec in specs}


def flags(spec: ProcessSpec) -> dict[str, str]:
    words = spec.argv[4:]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_one_of_each_by_default_and_as_many_as_wanted(tmp_path: Path) -> None:
    assert set(planned(tmp_path)) == {
        "nats", "store-0", "conductor-0", "prefill-0", "decode-0", "gateway-0",
    }  # fmt: skip
    many = planned(tmp_path, prefill=2, decode=0, worker=1, conductors=2)
    assert set(many) == {
        "nats", "store-0", "conductor-0", "conductor-1", "prefill-0", "prefill-1",
        "worker-0", "gateway-0",
    }  # fmt: skip


def test_every_role_accepts_the_flags_that_it_gets(tmp_path: Path) -> None:
    specs = planned(
        tmp_path,
        threads=3,
        dtype="bfloat16",
        device="auto",
        dram=1 << 28,
        catalog="sqlite:////x",
        worker=1,
    )
    known = schemas()
    for name, spec in specs.items():
        role = name.rpartition("-")[0]
        if role not in (*ROLES, "worker"):
            continue
        assert spec.argv[3] == role
        given = {
            key.removeprefix("--").replace("-", "_"): value
            for key, value in flags(spec).items()
        }
        environ = {k: v for k, v in spec.environment.items() if k.startswith("KVTIDE")}
        for schema in ("prefill", "decode") if role == "worker" else (role,):
            settings, _ = load_settings(
                known[schema], schema, flags=given, environ=environ, schemas=known
            )
            values = settings.model_dump()
            assert values["nats"] == NATS
            assert values["catalog"] == "sqlite:////x"
            assert values["node"] == name
            if role in ("prefill", "decode", "worker"):
                assert (values["dtype"], values["device"]) == ("bfloat16", "auto")
            assert values["shm_dir"] == tmp_path / "shm"


def test_the_token_is_in_no_command_line(tmp_path: Path) -> None:
    for spec in planned(tmp_path).values():
        assert not any("hush-hush" in word for word in spec.argv)
        assert "hush-hush" not in repr(spec)


def test_threads_of_workers_wait_passively(tmp_path: Path) -> None:
    specs = planned(tmp_path, threads=2)
    assert specs["prefill-0"].environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert specs["prefill-0"].environment["OMP_NUM_THREADS"] == "2"
    assert flags(specs["decode-0"])["--threads"] == "2"


def test_the_door_closes_first_and_the_bus_last(tmp_path: Path) -> None:
    specs = planned(tmp_path)
    order = sorted(specs, key=lambda name: specs[name].stop_stage)
    assert order[0] == "gateway-0"
    assert order[-2:] == ["store-0", "nats"]
    assert [n for n, spec in specs.items() if spec.start_stage == 0] == ["nats"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"prefill": 0}, "prefill"), ({"decode": 0, "worker": 0}, "decode")],
)
def test_a_system_without_a_kind_of_worker_is_refused(
    tmp_path: Path, changes: dict[str, object], key: str
) -> None:
    settings = UpSettings.model_validate({"state_dir": tmp_path / "x", **changes})
    with pytest.raises(ConfigError) as caught:
        up(settings, None, Console())
    assert caught.value.key == key
    assert not (tmp_path / "x").exists()
