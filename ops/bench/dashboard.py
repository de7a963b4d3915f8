r"""The dashboard of a large cluster: what a page costs the browser, and the gateway.

    .venv/bin/python ops/bench/dashboard.py --model FOLDER --out ops/bench/results

A real gateway on a real NATS server hears ``--nodes`` pretended nodes beat twice a second,
and ``--rate`` requests a second be placed and end (elsewhere: this gateway serves none).
Chromium looks at each page for ``--seconds``; in the page, the time between animation
frames is kept. The gateway's CPU time is read without a page, and with one.

Writes dashboard.json. The feeder, the gateway and Chromium share the machine's cores.
"""

import argparse
import asyncio
import json
import platform
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import psutil
from playwright.async_api import Browser, async_playwright

from kvtide.bus import BusLimits
from kvtide.bus.codec import Codec
from kvtide.bus.messages import (
    Beat,
    DecodeLoad,
    Message,
    NodeState,
    Outcome,
    PlacementMade,
    PrefillLoad,
    RequestEnded,
    StoreLoad,
)
from kvtide.bus.nats_link import NatsLink
from kvtide.bus.subjects import Subjects
from kvtide.cli.supervisor.nats_server import find_nats_server
from kvtide.kv import BlockKey, NodeId, NodeRef, RequestId, Role, TenantId
from kvtide.runtime import SystemClock

CLOCK = SystemClock()
SUBJECTS = Subjects("local")
PAGES = ("cluster", "requests", "cache", "targets")
FRAMES = """
  window.long_ms = [];
  new PerformanceObserver((list) => { for (const each of list.getEntries()) window.long_ms.push(each.duration); })
    .observe({ type: "longtask" });
  window.frames_ms = []; let last = performance.now();
  const tick = (now) => { window.frames_ms.push(now - last); last = now; requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
"""
ME = NodeRef(NodeId("feeder"), 1)
FIRST = NodeRef(NodeId("conductor-x"), 1)


class Feeder:
    """Pretends to be the cluster."""

    def __init__(self, link: NatsLink, nodes: int, rate: int) -> None:
        self._link = link
        self._nodes = [NodeRef(NodeId(f"node-{n}"), 1) for n in range(nodes)]
        self._rate = rate
        self._codec = Codec()
        self._seq = 0
        self.sent = 0

    async def run(self) -> None:
        """Beats and requests, for ever; falls behind rather than piling up."""
        tick_s, number = 0.05, 0
        while True:
            begun_s = CLOCK.monotonic()
            self._seq += 1
            part = self._seq % 10  # each node once in half a second
            for index in range(part, len(self._nodes), 10):
                await self._beat(index)
            for _ in range(int(self._rate * tick_s)):
                await self._request(number)
                number += 1
            await CLOCK.sleep(tick_s - (CLOCK.monotonic() - begun_s))

    async def _send(self, subject: str, sender: NodeRef, message: Message) -> None:
        data = self._codec.wrap(sender, "", self._codec.encode_body(message))
        await self._link.send(subject, data)
        self.sent += 1

    async def _beat(self, index: int) -> None:
        ref = self._nodes[index]
        busy = (self._seq * 7 + index * 13) % 100 / 100
        loads = {
            Role.PREFILL: PrefillLoad(queued=self._seq % 9, busy_share=busy),
            Role.DECODE: DecodeLoad(running=self._seq % 30, busy_share=busy),
            Role.STORE: StoreLoad(used_bytes=self._seq << 20, capacity_bytes=1 << 40),
        }
        role = tuple(loads)[index % 3]
        beat = Beat(
            node=ref,
            roles=(role,),
            seq=self._seq,
            host=f"host-{index // 3}",
            state=NodeState.READY,
            steps=self._seq,
            load=(loads[role],),
        )
        await self._send(SUBJECTS.beat(ref.node), ref, beat)

    async def _request(self, number: int) -> None:
        request, keys = RequestId(f"r{number}"), _keys(number % 50)
        prefill, decode = self._nodes[0].node, self._nodes[1].node
        common: dict[str, Any] = {
            "request": request, "attempt": 1, "gateway": ME, "model": "m",
            "tenant": TenantId("t"), "prompt_tokens": 2048,
        }  # fmt: skip
        placed = PlacementMade(
            **common, conductor=FIRST, prefill=prefill, decode=decode, new_tokens=100,
            max_new_tokens=64, prefill_ms=90.0, keys=keys, hold_ms=100.0, ttft_ms=120.0,
        )  # fmt: skip
        ended = RequestEnded(
            **common, outcome=Outcome.FINISHED, code="stop", cached_tokens=1024,
            output_tokens=64, ttft_ms=130.0, total_ms=900.0, tbt_ms=12.0,
        )  # fmt: skip
        await self._send(SUBJECTS.placements(FIRST.node), FIRST, placed)
        await self._send(SUBJECTS.ended(ME.node), ME, ended)


def _keys(chain: int) -> tuple[BlockKey, ...]:
    shared = [BlockKey((1 << 64 | n).to_bytes(16)) for n in range(8)]
    own = [BlockKey((chain << 80 | 1 << 70 | n).to_bytes(16)) for n in range(8)]
    return (*shared, *own)


async def look(
    browser: Browser, url: str, page_name: str, seconds: float
) -> dict[str, float]:
    """Frame times of one page, in ms, after it has settled."""
    context = await browser.new_context(viewport={"width": 1280, "height": 900})
    page = await context.new_page()
    await page.goto(f"{url}/ui/#/{page_name}")
    await page.wait_for_selector("#status:has-text('live')", timeout=60_000)
    await CLOCK.sleep(3)
    await page.evaluate(FRAMES)
    devtools: Any = await context.new_cdp_session(page)
    await devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
    before = await cpu_ms(devtools)
    await CLOCK.sleep(seconds)
    after = await cpu_ms(devtools)
    frames = sorted(await page.evaluate("window.frames_ms"))
    long_ms = await page.evaluate("window.long_ms")
    await context.close()
    return {
        "long_tasks": len(long_ms),
        "longest_task_ms": round(max(long_ms, default=0.0), 1),
        **{
            f"{name}_ms_per_s": round((after[name] - before[name]) / seconds, 1)
            for name in after
        },
        "frames": len(frames),
        "p50_ms": round(frames[len(frames) // 2], 1),
        "p99_ms": round(frames[int(len(frames) * 0.99)], 1),
        "most_ms": round(frames[-1], 1),
    }


async def cpu_ms(devtools: Any) -> dict[str, float]:
    """The processor's time that the page's main thread has taken, by what it did."""
    told: dict[str, Any] = await devtools.send("Performance.getMetrics")
    names = {"TaskDuration": "task", "ScriptDuration": "script", "LayoutDuration": "layout",
             "RecalcStyleDuration": "style"}  # fmt: skip
    return {
        names[each["name"]]: 1000 * each["value"]
        for each in told["metrics"]
        if each["name"] in names
    }


async def answering(url: str, limit_s: float = 60.0) -> None:
    """Until the gateway has opened its port; a ``TimeoutError`` if it does not."""
    async with asyncio.timeout(limit_s), httpx.AsyncClient() as http:
        while True:
            try:
                await http.get(f"{url}/livez")
            except httpx.TransportError:
                await CLOCK.sleep(0.2)
            else:
                return


async def cpu_share(process: psutil.Process, seconds: float) -> float:
    """CPU time of the gateway in cores, over some seconds."""
    before = sum(process.cpu_times()[:2])
    await CLOCK.sleep(seconds)
    return round((sum(process.cpu_times()[:2]) - before) / seconds, 3)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start all, look, end all."""
    nats_port, port = free_port(), free_port()
    nats = f"nats://127.0.0.1:{nats_port}"
    server = await asyncio.create_subprocess_exec(
        *(str(find_nats_server()), "--addr", "127.0.0.1", "--port", str(nats_port)),
        stderr=asyncio.subprocess.DEVNULL,
    )
    gateway = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvtide.cli", "gateway", "--node", "gateway-0"),
        *("--nats", nats, "--model", str(args.model), "--http-port", str(port)),
        *("--state-dir", str(folder), "--log-level", "warning"),
    )
    url = f"http://127.0.0.1:{port}"
    try:
        link = await NatsLink.open(nats, name="feeder", limits=BusLimits(), clock=CLOCK)
        feeder = Feeder(link, args.nodes, args.rate)
        async with asyncio.TaskGroup() as tasks:
            feeding = tasks.create_task(feeder.run())
            try:
                return await look_all(args, url, psutil.Process(gateway.pid), feeder)
            finally:
                feeding.cancel()
    finally:
        for process in (gateway, server):
            process.terminate()
            await process.wait()


async def look_all(
    args: argparse.Namespace, url: str, process: psutil.Process, feeder: Feeder
) -> dict[str, Any]:
    """The gateway alone, then with each page open."""
    await answering(url)
    await CLOCK.sleep(10)  # everybody has joined
    sent, begun_s = feeder.sent, CLOCK.monotonic()
    found: dict[str, Any] = {
        "gateway_cores_unwatched": await cpu_share(process, args.seconds)
    }
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name in PAGES:
            looking = asyncio.gather(
                look(browser, url, name, args.seconds), cpu_share(process, args.seconds)
            )
            frames, cores = await looking
            found[name] = {**frames, "gateway_cores": cores}
            print(name, found[name], flush=True)
        await browser.close()
    over_s = CLOCK.monotonic() - begun_s
    found["messages_per_s"] = round((feeder.sent - sent) / over_s)
    found["gateway_rss_mib"] = round(process.memory_info().rss / 2**20)
    return found


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, required=True, help="has a tokenizer.json"
    )
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--rate", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtide-dash-") as folder:
        found = asyncio.run(measure(args, Path(folder)))
    report = {
        "command": f"ops/bench/dashboard.py --nodes {args.nodes} --rate {args.rate}",
        "machine": f"{platform.machine()}, {psutil.cpu_count()} cores",
        "python": platform.python_version(),
        **found,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if args.out is not None:
        (args.out / "dashboard.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
