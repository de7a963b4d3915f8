"""Every metric that alerts and dashboards name exists, and every alert has a runbook."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry

from kvtide.bus.messages import StoreLoad
from kvtide.bus.metrics import BusMetrics
from kvtide.conductor.metrics import ConductorMetrics
from kvtide.decode.metrics import DecodeMetrics
from kvtide.gateway.metrics import GatewayMetrics
from kvtide.pool.metrics import PoolMetrics
from kvtide.prefill.metrics import PrefillMetrics
from kvtide.store.metrics import StoreMetrics
from kvtide.store.tally import Tally
from kvtide.transfer.metrics import PrometheusObserver

OPS = Path(__file__).parents[2] / "ops"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
OF_PROMETHEUS = {"up"}


def series_of_all_roles() -> set[str]:
    """The names of all series that our processes show."""
    registry = CollectorRegistry()
    for owner in (
        BusMetrics,
        ConductorMetrics,
        DecodeMetrics,
        GatewayMetrics,
        PoolMetrics,
        PrefillMetrics,
        PrometheusObserver,
    ):
        owner(registry)
    StoreMetrics(registry).update(StoreLoad(), 0, Tally())
    return {
        family.name + suffix
        for family in registry.collect()
        for suffix in SUFFIXES.get(family.type, ("",))
    }


def selectors(expression: Any) -> Iterator[promql_parser.VectorSelector]:
    """All selectors of series in a parsed expression."""
    match expression:
        case promql_parser.VectorSelector():
            yield expression
        case promql_parser.MatrixSelector():
            yield expression.vector_selector
        case promql_parser.BinaryExpr():
            yield from selectors(expression.lhs)
            yield from selectors(expression.rhs)
        case promql_parser.Call():
            for each in expression.args:
                yield from selectors(each)
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            return
        case _:
            yield from selectors(expression.expr)


def parsed(text: str) -> Any:
    """PromQL as Prometheus parses it, Grafana's variable for an interval replaced."""
    return promql_parser.parse(text.replace("$__rate_interval", "1m"))


def rules() -> list[dict[str, Any]]:
    """All rules of the rules file, in order."""
    document = yaml.safe_load((OPS / "prometheus/rules.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def named_by_dashboards() -> dict[str, str]:
    """Expression by where it is."""
    return {
        f"{path.name}: {panel['title']} {target['refId']}": target["expr"]
        for path in sorted((OPS / "grafana/dashboards").glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    }


def unknown(text: str, known: set[str]) -> set[str]:
    """The series in ``text`` that nobody shows."""
    return {each.name or str(each) for each in selectors(parsed(text))} - known


def test_every_series_named_exists() -> None:
    known = series_of_all_roles() | OF_PROMETHEUS
    known |= {rule["record"] for rule in rules() if "record" in rule}
    named = named_by_dashboards()
    for rule in rules():
        named[rule.get("alert") or rule["record"]] = rule["expr"]
    missing = {
        where: gone for where, text in named.items() if (gone := unknown(text, known))
    }
    assert not missing
    assert len(named) > 40


def test_a_name_that_is_wrong_is_found() -> None:
    text = 'sum(rate(kvtide_no_such_total{a="b"}[5m])) / on () (up > 0) > 1'
    assert unknown(text, OF_PROMETHEUS) == {"kvtide_no_such_total"}


def test_each_alert_has_its_runbook_and_each_runbook_its_alert() -> None:
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    books = {path.stem for path in (OPS / "runbooks").glob("*.md")}
    assert set(alerts) == books
    for name, rule in alerts.items():
        assert rule["annotations"]["runbook"] == f"ops/runbooks/{name}.md"
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}


@pytest.fixture
def maker() -> ModuleType:
    """The program that writes the dashboards."""
    spec = importlib.util.spec_from_file_location("make", OPS / "grafana/make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_dashboards_are_what_the_program_writes(maker: ModuleType) -> None:
    for name, (title, rows) in maker.DASHBOARDS.items():
        path = OPS / f"grafana/dashboards/{name}.json"
        assert path.read_text() == maker.dashboard_json(name, title, rows)
        panels = json.loads(path.read_text())["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
