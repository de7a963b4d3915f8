"""What each command needs is in its extra: engines' hosts have no more than the base."""

import subprocess
import sys

import pytest

_SCRIPT = """
import importlib, sys

class Absent:
    names = set(sys.argv[1].split(","))

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Absent())
from kvtide.cli.roles import schemas
assert "store" in schemas()
for role in ("store", "conductor", "router"):
    importlib.import_module(f"kvtide.{role}.app")
"""
_ABSENT = (
    *("fastapi", "starlette", "uvicorn", "jinja2", "tokenizers", "llguidance"),
    *("torch", "transformers", "safetensors", "gguf"),
)


@pytest.mark.timeout(240)
def test_roles_start_without_what_only_gateways_and_workers_need() -> None:
    command = [sys.executable, "-c", _SCRIPT, ",".join(_ABSENT)]
    done = subprocess.run(command, capture_output=True, timeout=200, check=False)  # noqa: S603 - our own arguments
    assert done.returncode == 0, done.stderr.decode()[-2000:]
