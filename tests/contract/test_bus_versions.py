# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Two versions side by side: they understand each other, or refuse aloud."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.contract.record_wire import ROOT, record, unpack
from tests.integration.cluster import Cluster, RoleProcess
from typing_extensions import override

from kvtide.bus import PROTOCOL, Codec, DropReason, WireError, decode_plain
from kvtide.bus.messages import AnyMessage
from kvtide.engine.demo import default_cache_dir, ensure_demo_model

EARLIER = json.loads((Path(__file__).with_name("wire_earlier.json")).read_text())
COMMIT: str = EARLIER["commit"]
ENVELOPES = {tag: bytes.fromhex(text) for tag, text in EARLIER["envelopes"].items()}
OPEN = """
import json, sys
from kvtide.bus import Codec, WireError
codec, failed = Codec(), {}
for tag, text in json.load(sys.stdin).items():
    try:
        codec.open(bytes.fromhex(text))
    except WireError as error:
        failed[tag] = error.reason
print(json.dumps(failed))
"""


def has_commit() -> bool:
    words = ["git", "cat-file", "-e", f"{COMMIT}^{{commit}}"]
    found = subprocess.run(words, cwd=ROOT, check=False, capture_output=True)  # noqa: S603
    return found.returncode == 0


needs_history = pytest.mark.skipif(not has_commit(), reason="a clone without history")


def keeps(now: Any, then: Any) -> bool:
    """Whether all that was said then is said now; more may be."""
    match now, then:
        case dict(), dict():
            return all(keeps(now.get(key), value) for key, value in then.items())
        case list(), list():
            return len(now) == len(then) and all(map(keeps, now, then))
        case _:
            return now == then


def test_messages_of_the_earlier_version_are_read_or_refused_as_of_another() -> None:
    """Whoever breaks this must count the protocol up, and record anew."""
    codec, unread = Codec(), dict[str, str]()
    for tag, data in ENVELOPES.items():
        plain = decode_plain(data)
        if plain[0] != PROTOCOL:
            with pytest.raises(WireError) as caught:
                codec.open(data)
            assert caught.value.reason == DropReason.PROTOCOL
            continue
        try:
            body = codec.open(data).body
        except WireError as error:
            unread[tag] = str(error)
            continue
        again = decode_plain(codec.encode_body(body))
        # a field that is lost would be one that its sender relies on
        lost = {key for key in plain[4] if not keeps(again.get(key), plain[4][key])}
        if lost:
            unread[tag] = f"loses {sorted(lost)}"
    assert unread == {}


def test_every_kind_of_message_has_a_version_before_all_else() -> None:
    for tag, text in record().items():
        plain = decode_plain(bytes.fromhex(text))
        assert plain[0] == PROTOCOL
        assert plain[4]["t"] == tag
        other = [PROTOCOL + 1, *plain[1:]]
        with pytest.raises(WireError, match="run the same version") as caught:
            Codec().open(msgspec.msgpack.encode(other))
        assert caught.value.reason == DropReason.PROTOCOL
    assert len(record()) == len(AnyMessage.__args__)


@pytest.mark.full
@pytest.mark.timeout(120)
@needs_history
def test_the_earlier_version_reads_ours(tmp_path: Path) -> None:
    environment = unpack(COMMIT, tmp_path)
    known = {tag: text for tag, text in record().items() if tag in ENVELOPES}
    told = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", OPEN],
        env=environment,
        input=json.dumps(known),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert json.loads(told.stdout) == {}


class EarlierProcess(RoleProcess):
    """A role by the earlier version's own command line."""

    @property
    @override
    def command(self) -> list[str]:
        flags = (f"--{k.replace('_', '-')}={v}" for k, v in self.settings.items())
        return [sys.executable, "-m", "kvtide.cli", self.role, *flags]


class Mixed(Cluster):
    """A cluster of which some processes run the earlier version.

    They have a catalog of their own, for they refuse one that ours has upgraded.
    """

    def __init__(self, folder: Path, earlier: frozenset[str]) -> None:
        model = str(ensure_demo_model(default_cache_dir()))
        worker: dict[str, object] = {"model": model, "threads": 1}
        super().__init__(
            folder,
            conductors=1,
            gateways=1,
            settings={
                "prefill": worker,
                "decode": worker,
                "gateway": {"model": model},
            },
        )
        self._earlier = earlier
        home = folder / "earlier"
        home.mkdir()
        self._environment = unpack(COMMIT, home)

    @override
    def add(self, role: str, number: int, **settings: object) -> RoleProcess:
        process = super().add(role, number, **settings)
        if process.name not in self._earlier:
            return process
        self.kill(process.name)
        catalog = f"sqlite:///{self.folder}/earlier.sqlite3"
        own = {**process.settings, "catalog": catalog}
        earlier = EarlierProcess(process.name, role, own, process.log, process.http_url)
        earlier.start({**self._environment, "OMP_NUM_THREADS": "1"})
        self.processes[process.name] = earlier
        return earlier


def ask(url: str, body: Mapping[str, object]) -> dict[str, object]:
    request = urllib.request.Request(  # noqa: S310 - our own address
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
        return json.loads(answer.read())


@pytest.mark.full
@pytest.mark.timeout(600)
@needs_history
@pytest.mark.parametrize(
    "earlier",
    [
        frozenset({"prefill-0", "decode-0"}),
        frozenset({"decode-0", "store-0"}),
        frozenset({"gateway-0", "conductor-0", "prefill-0"}),
    ],
    ids=lambda names: "-".join(sorted(names)),
)
def test_workers_of_the_earlier_version_serve_beside_ours(
    tmp_path: Path, earlier: frozenset[str]
) -> None:
    """Their answers are those of two others, and what is cached is used across."""
    prompt = "The tide comes in and the tide goes out. " * 40
    with Mixed(tmp_path, earlier) as cluster:
        cluster.wait_ready(240)
        url = cluster["gateway-0"].http_url
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:  # noqa: S310
            model = json.loads(answer.read())["data"][0]["id"]
        body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0}
        first, second = ask(url, body), ask(url, body)
        assert first["choices"] == second["choices"]
        usage = second["usage"]
        assert isinstance(usage, dict)
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0
        refused = [
            name
            for name in cluster.processes
            if "protocol" in cluster.tail(cluster[name], 100_000)
        ]
        assert refused == []
