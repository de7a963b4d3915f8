"""Whatever is in a file is read, or named as wrong: disks, settings, clusters, traces."""

import gzip
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.unit.fuzzing import LONG_MARKS, ROUNDS, Target, fuzz
from tests.unit.ssd_driver import NODE, SsdDriver, key_of
from tests.unit.test_ssd_sealed import SealedDriver

from kvtide.cli.roles import schemas
from kvtide.kv import LoggedRequest
from kvtide.policy.profiles import ProfileError, read_profiles
from kvtide.runtime import ConfigError, SystemClock
from kvtide.runtime.settings import load_settings
from kvtide.sim.hit_rates import TraceError, read_trace
from kvtide.sim.perf.shapes import read_cluster
from kvtide.sim.perf.workload import read_workload
from kvtide.store.settings import StoreSettings
from kvtide.store.ssd.errors import FormatError
from kvtide.store.ssd.events import TierFailed, TierOpened
from kvtide.store.ssd.files import FilesSpec, TierFiles
from kvtide.store.ssd.format import (
    PAGE_BYTES,
    Envelope,
    Superblock,
    check_frame,
    sealed_tail,
    segment_page,
)
from kvtide.store.tombstones import Tombstones

ROOT = Path(__file__).resolve().parents[2]
LINE = LoggedRequest(1.0, 40, 3, (7, 8), 16, "m").line()
SETTINGS = (
    b'[common]\nnats = "nats://a:1"\n[store]\nssd_bytes = 5\ntenant_weights = {a = 2}\n'
)
PROFILE = b"[default.prefill]\nfixed_ms = 1.0\ntoken_ms = 0.5\npair_us = 0.1\n"


class Folder:
    """Files that hold what is tried."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def of(
        self, name: str, read: Callable[[Path], object]
    ) -> Callable[[bytes], object]:
        def feed(data: bytes) -> object:
            path = self.path / name
            path.write_bytes(data)
            return read(path)

        return feed


def store_settings(path: Path) -> object:
    return load_settings(
        StoreSettings, "store", environ={}, toml_path=path, schemas=schemas()
    )


def frame(data: bytes) -> object:
    found = check_frame(data, segment=1, offset=PAGE_BYTES, seed=3)
    return Envelope.decode(data[64:]) if found.sealed else found


def targets(folder: Folder) -> dict[str, Target]:
    clusters = sorted((ROOT / "examples" / "clusters").glob("*.toml"))
    zipped = gzip.compress(LINE * 3)
    superblock = Superblock("node", 7, b"d" * 16).encode()
    made = [
        Target(
            "settings", folder.of("s.toml", store_settings), (ConfigError,), (SETTINGS,)
        ),
        Target(
            "cluster",
            folder.of("c.toml", read_cluster),
            (ConfigError,),
            tuple(path.read_bytes() for path in clusters[:3]),
        ),
        Target(
            "workload",
            folder.of("w.toml", lambda p: read_workload(p, 16)),
            (ConfigError,),
        ),
        Target("trace", folder.of("t.jsonl", read_trace), (TraceError,), (LINE * 3,)),
        Target("zipped", folder.of("t.jsonl.gz", read_trace), (TraceError,), (zipped,)),
        Target(
            "profile", lambda d: read_profiles(d.decode("latin-1")), (ProfileError,)
        ),
        Target(
            "json_profile",
            lambda d: read_profiles(d.decode("latin-1"), json=True),
            (ProfileError,),
            (b'{"default": {}}',),
        ),
        Target("superblock", Superblock.decode, (FormatError,), (superblock,)),
        Target(
            "segment",
            lambda d: sealed_tail(d, b"d" * 16, 1),
            (),
            (segment_page(b"d" * 16, 1, 9),),
        ),
        Target("frame", frame, (FormatError,)),
        Target(
            "tombstones",
            folder.of("deletions.json", tombstones),
            (),
            (b'{"spaces":[["6b","",7]],"keys":[]}',),
        ),
    ]
    return {target.name: target for target in made}


def tombstones(path: Path) -> object:
    return Tombstones(path, "sqlite+aiosqlite:///nowhere", b"s" * 32)._kept()  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("name", list(targets(Folder(Path()))))
def test_any_file_is_read_or_named_as_wrong(
    tmp_path: Path, name: str, rounds: int
) -> None:
    fuzz(targets(Folder(tmp_path))[name], rounds)


@pytest.mark.parametrize("opening", ["[", '{"a":', "a=[", "[[a.", "a={b="])
def test_deep_files_are_named_as_wrong(tmp_path: Path, opening: str) -> None:
    folder = Folder(tmp_path)
    for target in targets(folder).values():
        deep = Target(target.name, target.read, target.errors)
        with suppress(*deep.errors):
            deep.read((opening * 20_000).encode())


# ---- a store's directory


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> SealedDriver:
    """A store that has ended, with sealed blocks on its disk."""
    made = SealedDriver(tmp_path_factory.mktemp("store") / "ssd")
    for number in range(1, 31):
        made.put([key_of(number)])
        made.quiet()
    made.stop()
    return made


def opened(path: Path, store: SsdDriver, *, sealed: bool) -> object:
    keys = store.keys if isinstance(store, SealedDriver) and sealed else None
    spec = FilesSpec(path, NODE, key_id=7, keys=keys)
    files = TierFiles(spec, store.arena, SystemClock())
    try:
        return files.open(lambda _: None)
    finally:
        files.close()


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(12, id="short"),
        pytest.param(600, id="long", marks=LONG_MARKS),
    ],
)
@pytest.mark.parametrize(
    "name", ["segment", "superblock", "deleted", "removed", "sealed"]
)
def test_any_bytes_on_the_disk_open_or_are_named_as_wrong(
    store: SealedDriver, name: str, rounds: int
) -> None:
    files = {
        "segment": min(store.path.glob("*.seg")),
        **{
            each: store.path / each
            for each in ("superblock", "deleted", "removed", "sealed")
        },
    }
    before = {path.name: path.read_bytes() for path in store.path.iterdir()}
    good = before.get(files[name].name, b'["6b", null, 7]\n')

    def read(data: bytes) -> object:
        for path in list(store.path.iterdir()):
            path.unlink()
        for other, content in before.items():
            (store.path / other).write_bytes(content)
        files[name].write_bytes(data)
        event = opened(store.path, store, sealed=True)
        assert isinstance(event, (TierOpened, TierFailed))
        return event

    fuzz(Target(name, read, (), (good,)), rounds)
