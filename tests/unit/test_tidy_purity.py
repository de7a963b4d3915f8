"""Decisions are pure: no clock, socket, randomness or await where they are made."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

PURE = (
    "kvtide.kv",
    "kvtide.policy",
    "kvtide.gateway.life",
    "kvtide.gateway.reading",
    "kvtide.conductor.reducers",
    "kvtide.conductor.dispatcher",
    "kvtide.store.slots",
    "kvtide.store.slot_states",
    "kvtide.store.keeps",
    "kvtide.store.candidates",
    "kvtide.store.accounts",
    "kvtide.store.room",
    "kvtide.store.eviction",
    "kvtide.store.extents",
    "kvtide.store.curation",
    "kvtide.store.host",
    "kvtide.store.slabs",
    "kvtide.store.spaces",
    "kvtide.store.index",
    "kvtide.store.changes",
    "kvtide.store.inventory",
    "kvtide.store.replicas",
    "kvtide.store.arrivals",
    "kvtide.store.fetches",
    "kvtide.store.drain",
    "kvtide.store.leases",
    "kvtide.store.puts",
    "kvtide.store.verify",
    "kvtide.store.machine",
    "kvtide.store.ssd.books",
    "kvtide.store.ssd.budget",
    "kvtide.store.ssd.cleaning",
    "kvtide.store.ssd.demotion",
    "kvtide.store.ssd.entries",
    "kvtide.store.ssd.events",
    "kvtide.store.ssd.format",
    "kvtide.store.ssd.health",
    "kvtide.store.ssd.looking",
    "kvtide.store.ssd.rules",
    "kvtide.store.ssd.segments",
    "kvtide.store.ssd.staging",
    "kvtide.store.ssd.tier",
    "kvtide.prefill.queue",
    "kvtide.decode.batcher",
    "kvtide.bus.ownership",
    "kvtide.bus.roster",
    "kvtide.bus.following",
    "kvtide.prefill.job",
    "kvtide.prefill.loads",
    "kvtide.prefill.line",
    "kvtide.prefill.holdings",
    "kvtide.prefill.intake",
    "kvtide.worker.custody",
    "kvtide.worker.events",
    "kvtide.worker.pace",
    "kvtide.worker.roles",
    "kvtide.worker.steps",
    "kvtide.prefill.ends",
    "kvtide.decode.answer",
    "kvtide.decode.arrival",
    "kvtide.decode.ends",
    "kvtide.decode.farewell",
    "kvtide.decode.handover",
    "kvtide.decode.holdings",
    "kvtide.decode.intake",
    "kvtide.decode.pages",
    "kvtide.decode.sequence",
    "kvtide.connect.kv_events",
    "kvtide.connect.pool_events",
    "kvtide.router.answer",
    "kvtide.router.asking",
    "kvtide.router.cache_map",
    "kvtide.router.engine_load",
    "kvtide.router.event_order",
    "kvtide.router.events",
    "kvtide.router.salts",
    "kvtide.router.serving",
    "kvtide.router.shelf",
    "kvtide.connect.prefix_plan",
    "kvtide.connect.rest",
    "kvtide.connect.shape",
    "kvtide.connect.space",
    "kvtide.cli.serve_bench.counters",
    "kvtide.cli.serve_bench.dialogue",
    "kvtide.cli.serve_bench.figures",
    "kvtide.cli.serve_bench.outcomes",
    "kvtide.cli.serve_bench.plot",
    "kvtide.cli.serve_bench.reading",
    "kvtide.cli.serve_bench.traces",
    "kvtide.cli.serve_bench.words",
    "kvtide.cli.serve_bench.workload",
)
IMPURE = {
    "aiosqlite",
    "asyncio",
    "nats",
    "os",
    "random",
    "secrets",
    "select",
    "socket",
    "sqlalchemy",
    "structlog",
    "subprocess",
    "threading",
    "time",
    "torch",
}


def folder_of(package: str) -> Path:
    """``kvtide.kv`` → ``libs/kv/kvtide/kv``."""
    name = package.split(".")[1]
    return next(
        ROOT / top / name / "kvtide" / name
        for top in ("libs", "services")
        if (ROOT / top / name).is_dir()
    )


def files_of(module: str) -> Iterator[Path]:
    base = folder_of(module).joinpath(*module.split(".")[2:])
    if base.is_dir():
        yield from sorted(base.rglob("*.py"))
    elif base.with_suffix(".py").is_file():
        yield base.with_suffix(".py")


def linted() -> list[dict[str, Any]]:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return pyproject["tool"]["importlinter"]["contracts"]


def test_pure_modules_import_nothing_impure_and_never_await() -> None:
    found: list[str] = []
    for module in PURE:
        for path in files_of(module):
            where = path.relative_to(ROOT)
            for node in ast.walk(ast.parse(path.read_text())):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module:
                    names = [node.module]
                elif isinstance(node, (ast.AsyncFunctionDef, ast.Await)):
                    found.append(f"{where}:{node.lineno} is asynchronous")
                found += [
                    f"{where}:{getattr(node, 'lineno', 0)} imports {name}"
                    for name in names
                    if name.split(".")[0] in IMPURE
                ]
    assert found == []


def test_every_pure_module_is_in_the_import_contract() -> None:
    (contract,) = [item for item in linted() if item["name"] == "Decisions are pure"]
    there = {module for module in PURE if any(files_of(module))}
    assert there - set(contract["source_modules"]) == set()


def test_the_layers_hold_every_package() -> None:
    (contract,) = [item for item in linted() if item["type"] == "layers"]
    assert contract["exhaustive"] is True
    layers = contract["layers"]
    assert layers[0] == "cli"
    assert layers[-1] == "runtime"
