"""Records what an earlier version's messages look like on the wire.

    python tests/contract/record_wire.py COMMIT >tests/contract/wire_earlier.json

One message of each kind, every field set, encoded by that version's own code, which is
taken from git. Record anew when a release is made; see ``test_bus_versions.py``.
"""

import json
import os
import subprocess
import sys
import tempfile
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parents[2]
PLAIN: dict[Any, Any] = {bool: True, int: 7, float: 1.5, str: "name", bytes: b"k" * 16}


def unpack(commit: str, folder: Path) -> dict[str, str]:
    """An earlier version's packages in ``folder``; an environment that runs them."""
    with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
        words = ["git", "archive", "--output", archive.name, commit, "libs", "services"]
        subprocess.run(words, cwd=ROOT, check=True)  # noqa: S603
        subprocess.run(["tar", "xf", archive.name, "-C", folder], check=True)  # noqa: S603, S607
    packages = [path.parent for path in folder.glob("*/*/kvtide")]
    path = os.pathsep.join(str(each) for each in sorted(packages))
    return {**os.environ, "PYTHONPATH": path}  # noqa: TID251 - a process's environment


def sample(hint: Any) -> Any:
    """A value of a type that a message may hold, with all that it may have."""
    if hint in PLAIN:
        return PLAIN[hint]
    if isinstance(hint, NewType):
        return sample(hint.__supertype__)
    parts = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return sample(next(part for part in parts if part is not NoneType))
    if parts:
        wanted = (parts[0],) * 2 if Ellipsis in parts else parts
        return tuple(map(sample, wanted))
    if issubclass(hint, Enum):
        return next(iter(hint))
    hints = get_type_hints(hint)
    names = [*getattr(hint, "__struct_fields__", hint.__annotations__)]
    return hint(**{name: sample(hints[name]) for name in names})


def record() -> dict[str, str]:
    """Envelopes in hex by the tag of their message, as this process's version writes them."""
    from kvtide.bus import Codec  # noqa: PLC0415 - of the version on the path
    from kvtide.bus.messages import AnyMessage  # noqa: PLC0415
    from kvtide.kv import NodeId, NodeRef  # noqa: PLC0415

    codec = Codec()
    sender = NodeRef(NodeId("earlier"), 5)
    return {
        str(kind.__struct_config__.tag): codec.wrap(
            sender, "trace", codec.encode_body(sample(kind))
        ).hex()
        for kind in AnyMessage.__args__
    }


def main(commit: str) -> None:
    """Record in a process of that version, and print."""
    words = ["git", "rev-parse", commit]
    full = subprocess.check_output(words, cwd=ROOT, text=True).strip()  # noqa: S603
    with tempfile.TemporaryDirectory() as folder:
        environment = unpack(full, Path(folder))
        words = [sys.executable, __file__, "--here"]
        told = subprocess.check_output(words, env=environment, text=True)  # noqa: S603
    shown = {"commit": full, "envelopes": json.loads(told)}
    sys.stdout.write(json.dumps(shown, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--here":
        sys.stdout.write(json.dumps(record()))
    else:
        main(sys.argv[1])
