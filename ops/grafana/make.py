"""Writes ops/grafana/dashboards/*.json: ``python ops/grafana/make.py``.

A dashboard is a list of rows, a row a list of panels of equal width. The JSON is made, not
drawn, so that a change of a metric's name is one line here and can be reviewed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "dashboards"
WIDTH = 24
HEIGHT = 8
SOURCE = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of time series; ``queries`` are (PromQL, legend), ``unit`` Grafana's."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    about: str = ""
    stacked: bool = False


def rate(metric: str, by: str, matcher: str = "") -> str:
    """The rate of a counter over the panel's interval, summed by labels."""
    return f"sum by ({by}) (rate({metric}{matcher}[$__rate_interval]))"


def quantiles(metric: str, *, by: str = "") -> tuple[tuple[str, str], ...]:
    """The 50th, 90th and 99th percentile of a histogram."""
    labels = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple(
        (
            f"histogram_quantile({share}, {rate(metric + '_bucket', labels)})",
            f"p{round(share * 100)}{legend}",
        )
        for share in (0.5, 0.9, 0.99)
    )


def share(part: str, whole: str) -> str:
    """A ratio of two rates that is empty, not infinite, when there is nothing."""
    return (
        f"sum(rate({part}[$__rate_interval]))"
        f" / (sum(rate({whole}[$__rate_interval])) > 0)"
    )


SERVICE = (
    (
        Panel(
            "Requests by outcome",
            ((rate("kvtide_gateway_requests_total", "outcome"), "{{outcome}}"),),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Admissions by verdict",
            ((rate("kvtide_conductor_decisions_total", "verdict"), "{{verdict}}"),),
            "reqps",
            "placed, direct (decode alone), or why they were refused",
            stacked=True,
        ),
        Panel(
            "Open requests",
            (("sum by (instance) (kvtide_gateway_open_requests)", "{{instance}}"),),
        ),
    ),
    (
        Panel("Time to first token", quantiles("kvtide_gateway_ttft_seconds"), "s"),
        Panel("Mean time between tokens", quantiles("kvtide_gateway_tbt_seconds"), "s"),
        Panel("End to end", quantiles("kvtide_gateway_e2e_seconds"), "s"),
    ),
    (
        Panel(
            "Tokens",
            (
                (
                    "sum(rate(kvtide_gateway_prompt_tokens_total[$__rate_interval]))",
                    "prompt",
                ),
                (
                    "sum(rate(kvtide_gateway_cached_tokens_total[$__rate_interval]))",
                    "cached",
                ),
                (
                    "sum(rate(kvtide_gateway_output_tokens_total[$__rate_interval]))",
                    "output",
                ),
            ),
            "short",
        ),
        Panel(
            "Share of prompt tokens from the cache",
            (
                (
                    share(
                        "kvtide_gateway_cached_tokens_total",
                        "kvtide_gateway_prompt_tokens_total",
                    ),
                    "hit share",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Placements a request",
            (
                (
                    share(
                        "kvtide_gateway_attempts_total", "kvtide_gateway_requests_total"
                    ),
                    "placements",
                ),
            ),
            about="more than 1: fail-over, or workers that refuse",
        ),
    ),
)

WORKERS = (
    (
        Panel(
            "Load of a role",
            (("max by (role) (kvtide_conductor_role_load)", "{{role}}"),),
            about="above 1 it can't keep up with its target",
        ),
        Panel(
            "Workers, and what the load asks for",
            (
                ("max by (role) (kvtide_conductor_role_workers)", "{{role}}"),
                (
                    "max by (role) (kvtide_conductor_role_wanted_workers)",
                    "{{role}} wanted",
                ),
            ),
        ),
        Panel(
            "Predicted times: median error",
            (
                ("max(kvtide_conductor_ttft_error_median_ratio)", "TTFT"),
                ("max(kvtide_conductor_tbt_error_median_ratio)", "TBT"),
                ("max by (cost) (kvtide_conductor_fit_error_ratio)", "{{cost}} fit"),
            ),
            "percentunit",
        ),
    ),
    (
        Panel("Prefill queue", quantiles("kvtide_prefill_queue_seconds"), "s"),
        Panel(
            "Prefill busy",
            (("kvtide_prefill_busy_share", "{{instance}}"),),
            "percentunit",
        ),
        Panel(
            "Prompt tokens by source",
            ((rate("kvtide_prefill_tokens_total", "source"), "{{source}}"),),
            stacked=True,
        ),
    ),
    (
        Panel("Decode step", quantiles("kvtide_decode_step_seconds"), "s"),
        Panel(
            "Decode load",
            (
                (
                    'sum by (what) (kvtide_decode_load{what=~"waiting|running"})',
                    "{{what}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Before the first token, by part",
            quantiles("kvtide_decode_before_first_token_seconds", by="part")[1:2],
            "s",
        ),
    ),
)

POOL = (
    (
        Panel(
            "Slots by state",
            (("sum by (state) (kvtide_store_slots)", "{{state}}"),),
            stacked=True,
        ),
        Panel(
            "Memory",
            (
                ("sum(kvtide_store_used_bytes)", "used"),
                ("sum(kvtide_store_backed_bytes)", "backed"),
                ("sum(kvtide_store_capacity_bytes)", "capacity"),
            ),
            "bytes",
        ),
        Panel(
            "SSD by state",
            (("sum by (state) (kvtide_store_ssd_bytes)", "{{state}}"),),
            "bytes",
            stacked=True,
        ),
    ),
    (
        Panel(
            "Blocks stored, evicted, demoted, promoted",
            (
                ("sum(rate(kvtide_store_stored_total[$__rate_interval]))", "stored"),
                ("sum(rate(kvtide_store_evicted_total[$__rate_interval]))", "evicted"),
                (
                    "sum(rate(kvtide_store_ssd_demoted_total[$__rate_interval]))",
                    "demoted",
                ),
                (
                    "sum(rate(kvtide_store_ssd_promoted_total[$__rate_interval]))",
                    "promoted",
                ),
            ),
        ),
        Panel(
            "Reads of the pool by outcome",
            (
                (
                    rate("kvtide_pool_reads_total", "purpose, outcome"),
                    "{{purpose}} {{outcome}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Bad copies by reason",
            ((rate("kvtide_pool_bad_copies_total", "reason"), "{{reason}}"),),
            about="found by verification and not used",
        ),
    ),
    (
        Panel(
            "Bytes by purpose (east-west)",
            (
                (
                    rate("kvtide_transfer_bytes_total", "purpose", '{side="client"}'),
                    "{{purpose}}",
                ),
            ),
            "Bps",
            stacked=True,
        ),
        Panel(
            "Bytes by path",
            (
                (
                    rate("kvtide_transfer_bytes_total", "path", '{side="client"}'),
                    "{{path}}",
                ),
            ),
            "Bps",
            stacked=True,
        ),
        Panel("Transfers", quantiles("kvtide_transfer_seconds", by="path")[1:2], "s"),
    ),
    (
        Panel(
            "Index",
            (
                (
                    "min by (instance) (kvtide_conductor_index_exact)",
                    "exact {{instance}}",
                ),
            ),
            about="1: exact; 0: catching up, a hint",
        ),
        Panel(
            "Blocks in the index",
            (("max(kvtide_conductor_indexed_blocks)", "keys"),),
        ),
        Panel(
            "Bus: dropped, unanswered, failed",
            (
                (rate("kvtide_bus_dropped_total", "reason"), "dropped: {{reason}}"),
                (rate("kvtide_bus_unanswered_total", "type"), "unanswered: {{type}}"),
                (rate("kvtide_bus_handler_failures_total", "type"), "failed: {{type}}"),
            ),
        ),
    ),
)

DASHBOARDS = {
    "service": ("kvtide: service", SERVICE),
    "workers": ("kvtide: workers", WORKERS),
    "pool": ("kvtide: pool and transfer", POOL),
}


def panel_json(panel: Panel, number: int, x: int, y: int, width: int) -> dict[str, Any]:
    """One panel in Grafana's schema."""
    custom: dict[str, Any] = {"fillOpacity": 20 if panel.stacked else 0}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend,
            }
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def dashboard_json(uid: str, title: str, rows: tuple[tuple[Panel, ...], ...]) -> str:
    """One dashboard as text, the same each time."""
    panels = [
        panel_json(
            panel,
            y * len(DASHBOARDS) * 2 + x + 1,
            x * (WIDTH // len(row)),
            y * HEIGHT,
            WIDTH // len(row),
        )
        for y, row in enumerate(rows)
        for x, panel in enumerate(row)
    ]
    document = {
        "uid": f"kvtide-{uid}",
        "title": title,
        "tags": ["kvtide"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "type": "datasource", "query": "prometheus"}]
        },
        "panels": panels,
    }
    return json.dumps(document, indent=1) + "\n"


def main() -> None:
    """Write all dashboards."""
    for name, (title, rows) in DASHBOARDS.items():
        text = dashboard_json(name, title, rows)
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
