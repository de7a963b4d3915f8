"""What is kept: every piece's figures as JSON, and a page made from them."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast


class Kept:
    """``vs_vllm.json`` and ``vs_vllm.md`` of one folder; pieces add up over runs."""

    def __init__(self, folder: Path) -> None:
        """Read what is there."""
        folder.mkdir(parents=True, exist_ok=True)
        self._json = folder / "vs_vllm.json"
        self._md = folder / "vs_vllm.md"
        text = self._json.read_text() if self._json.is_file() else "{}"
        self._pieces: dict[str, dict[str, Any]] = json.loads(text)

    def add(self, name: str, found: dict[str, Any], about: dict[str, str]) -> None:
        """Put it in the place of what was measured before, and write both files."""
        self._pieces[name] = {"about": about, **_anywhere(found)}
        ordered = dict(sorted(self._pieces.items()))
        self._json.write_text(json.dumps(ordered, indent=1) + "\n")
        self._md.write_text(self.markdown())

    def markdown(self) -> str:
        """The page."""
        return "\n".join(_page(self._pieces)) + "\n"


def _anywhere(found: Any) -> Any:
    """Without the folders of this machine: of a path its last name."""
    if isinstance(found, dict):
        record = cast("dict[str, Any]", found)
        return {key: _anywhere(value) for key, value in record.items()}
    if isinstance(found, list | tuple):
        return [_anywhere(value) for value in cast("Sequence[Any]", found)]
    if isinstance(found, str) and found.startswith("/") and "\n" not in found:
        return Path(found).name
    return found


def _page(pieces: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "# kvtide beside vLLM on a CPU"
    yield ""
    yield "Made by `ops/bench/vs_vllm/run.py`; how, and what is fair about it: its head."
    latencies = {name: each for name, each in pieces.items() if "ratio" in each}
    if latencies:
        yield ""
        yield from _table(
            (
                "",
                "kvtide, ms",
                "vLLM, ms",
                "ratio",
                "bar",
                "",
                "products alone, ms",
                "kvtide to products",
                "others' processes used at most",
            ),
            [_latency(name, each) for name, each in latencies.items()],
        )
    traces = {name: each for name, each in pieces.items() if "summary" in each}
    if traces:
        yield ""
        yield from _table(("", *traces), list(_traces(traces)))
    yield ""
    abouts = {json.dumps(each["about"], sort_keys=True) for each in pieces.values()}
    for text in sorted(abouts):
        yield "- " + "; ".join(json.loads(text).values())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(row)} |"


def _latency(name: str, each: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        f"{each['kvtide_ms']:,.0f}",
        f"{each['vllm_ms']:,.0f}",
        f"{each['ratio']:.2f}",
        f"at most {each['bar']:g}",
        "met" if each["met"] else "MISSED",
        f"{each['products_ms']:,.0f}",
        f"{each['kvtide_to_products']:.2f}",
        f"{each['strangers']:.0%}",
    )


def _traces(traces: dict[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    def row(name: str, *path: str, form: str = ",.0f") -> tuple[str, ...]:
        cells = [name]
        for each in traces.values():
            value: Any = each
            for key in path:
                value = None if value is None else value.get(key)
            cells.append("" if value is None else format(value, form))
        return tuple(cells)

    yield row("requests", "summary", "requests")
    yield row("completed", "summary", "outcomes", "completed")
    yield row("goodput", "summary", "goodput", form=".1%")
    for key in ("ttft_ms", "tbt_ms", "tpot_ms"):
        for part in ("mean", "p50", "p90"):
            yield row(f"{key[:-3].upper()} {part}, ms", "summary", key, part)
    yield row("prompt tokens from a cache", "summary", "hit_share", form=".1%")
    yield row("output tokens/s", "summary", "output_tokens_per_s", form=".1f")
    yield row("lasted, s", "summary", "span_s", form=".0f")
    for key in next(iter(traces.values()))["goodput_at"]:
        yield row(f"goodput at {key}", "goodput_at", key, form=".1%")
    for key in next(iter(traces.values()))["sizes"]:
        yield row(f"size: {key}", "sizes", key, form="")
