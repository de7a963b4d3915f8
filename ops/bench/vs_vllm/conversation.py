"""A scaled conversation trace on two vLLMs behind round robin, and on kvtide.

All sizes are fixed here, before anything runs: see ``Sizes``.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import servers

TRACE = Path(__file__).parents[3] / "examples" / "traces" / "conversation.jsonl.gz"


@dataclass(frozen=True, slots=True)
class Sizes:
    """KV in tokens of 46,080 bytes (float32). Times in ms, targets of both systems.

    Each vLLM computes on one of the two cores; kvtide's prefill and decode worker share
    both. ``worker_tokens`` is the KV memory of each vLLM, and of kvtide's decode worker;
    the pool is host memory that vLLM has no use for. The load's different prompt tokens
    (its working set) are 12,948: more than a worker has, less than the pool.
    """

    worker_tokens: int = 8192
    pool_bytes: int = 2 << 30
    sample: float = 0.02
    length_scale: float = 0.03
    speed: float = 10.0
    requests: int = 60
    ttft_ms: float = 5000.0
    tbt_ms: float = 1000.0
    seed: int = 5

    @property
    def pool_tokens(self) -> int:
        """What the pool has room for."""
        return self.pool_bytes // 46_080


def vllm_system(
    venv: Path, folder: Path, work: Path, sizes: Sizes
) -> contextlib.AbstractContextManager[tuple[servers.Server, tuple[str, ...]]]:
    """Two of them, a core each, and the proxy; with the pages of their counters."""

    @contextlib.contextmanager
    def started() -> Iterator[tuple[servers.Server, tuple[str, ...]]]:
        with contextlib.ExitStack() as stack:
            both = [
                stack.enter_context(
                    servers.vllm(
                        venv,
                        folder,
                        work,
                        caching=True,
                        kv_tokens=sizes.worker_tokens,
                        cores=str(number),
                        number=number,
                    )
                )
                for number in range(2)
            ]
            urls = [each.url for each in both]
            proxy = stack.enter_context(servers.round_robin(urls, work))
            yield proxy, tuple(f"{url}/metrics" for url in urls)

    return started()


def kvtide_system(
    folder: Path, work: Path, sizes: Sizes
) -> contextlib.AbstractContextManager[tuple[servers.Server, tuple[str, ...]]]:
    """One prefill and one decode worker; its counters are found by its state folder."""

    @contextlib.contextmanager
    def started() -> Iterator[tuple[servers.Server, tuple[str, ...]]]:
        dram = str(sizes.pool_bytes)
        with servers.kvtide(
            folder, work, dram=dram, kv_tokens=sizes.worker_tokens
        ) as server:
            yield server, ()

    return started()


def measure(
    server: servers.Server, pages: tuple[str, ...], sizes: Sizes, out: Path
) -> dict[str, Any]:
    """Replay the trace; what ``kvtide bench serve`` found."""
    command = [
        *(sys.executable, "-m", "kvtide.cli", "bench", "serve", server.url),
        *("--trace", str(TRACE), "--sample", str(sizes.sample)),
        *("--length-scale", str(sizes.length_scale), "--speed", str(sizes.speed)),
        *("--requests", str(sizes.requests), "--seed", str(sizes.seed)),
        *("--ttft-ms", str(sizes.ttft_ms), "--tbt-ms", str(sizes.tbt_ms)),
        *("--max-tokens", "4000", "--timeout-s", "300", "--out", str(out)),
        *(word for page in pages for word in ("--metrics", page)),
    ]
    if server.state_dir:
        command += ["--state-dir", server.state_dir]
    # 1: some requests failed; their outcomes are among the figures
    subprocess.run(command, check=False, timeout=900)  # noqa: S603 - ours
    found = json.loads((out / "serve.json").read_text())
    rows = found["requests"]
    return {
        "command": command,
        "sizes": {**asdict(sizes), "pool_tokens": sizes.pool_tokens},
        "summary": found["summary"],
        "goodput_at": {
            f"TTFT {ttft_ms / 1000:g} s, TBT {tbt_ms:g} ms": _goodput(
                rows, ttft_ms, tbt_ms
            )
            for ttft_ms in (2500, 5000, 10_000, 20_000)
            for tbt_ms in (300, 1000)
        },
        "counters": found["counters"],
    }


def _goodput(rows: list[dict[str, Any]], ttft_ms: float, tbt_ms: float) -> float:
    good = sum(
        row["outcome"] == "completed"
        and row["ttft_ms"] <= ttft_ms
        and row.get("tbt_ms", 0.0) <= tbt_ms
        for row in rows
    )
    return good / len(rows)
