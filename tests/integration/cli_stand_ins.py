"""``kvtide up`` with small stand-ins for the roles, as a process that can be killed.

``python cli_stand_ins.py STATE PORT [NAME=KIND …]``: kinds are ``steady`` (ready at
once), ``stubborn`` (ignores SIGTERM), ``refuses`` (exits 2), ``fails`` (exits 1).
Each stand-in leaves a file in the shared memory folder and starts a child of its own.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kvtide.cli.exits import exit_code
from kvtide.cli.settings import UpSettings, process_environment
from kvtide.cli.supervisor.addresses import free_ports
from kvtide.cli.supervisor.children import ProcessSpec
from kvtide.cli.supervisor.readiness import HttpProbe
from kvtide.cli.supervisor.screen import PlainScreen
from kvtide.cli.supervisor.supervise import Supervisor, WhenReady
from kvtide.cli.supervisor.up import Session
from kvtide.runtime import SystemClock

STAND_IN = """
import http.server, os, pathlib, signal, subprocess, sys
port, shm, kind, name = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
if kind == "refuses":
    print("error: threads: must be greater than 0", flush=True)
    sys.exit(2)
if kind == "fails":
    print("boom", flush=True)
    sys.exit(1)
if kind == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
pathlib.Path(shm, f"arena-{os.getpid()}").write_bytes(b"x" * 4096)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"])
print(f"pids {os.getpid()} {child.pid}", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"ready": true, "state": "ready"}')
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def specs(shm: Path, kinds: dict[str, str]) -> Sequence[ProcessSpec]:
    ports = free_ports(len(kinds))
    return [
        ProcessSpec(
            name=name,
            argv=(sys.executable, "-c", STAND_IN, str(port), str(shm), kind, name),
            environment=process_environment({}),
            probe=HttpProbe("127.0.0.1", port),
            start_stage=min(number, 1),
            stop_stage=len(kinds) - number,
        )
        for number, ((name, kind), port) in enumerate(
            zip(kinds.items(), ports, strict=True)
        )
    ]


def main() -> int:
    state, port = Path(sys.argv[1]), int(sys.argv[2])
    kinds = dict(word.split("=", 1) for word in sys.argv[3:])
    screen = PlainScreen(Console(file=sys.stdout, width=200))

    def when_ready(_supervisor: Supervisor) -> WhenReady:
        async def announce() -> None:
            await asyncio.sleep(0)
            screen.say(f"ALL READY {os.getpid()}")

        return announce

    session = Session(
        settings=UpSettings(state_dir=state, port=port),
        screen=screen,
        clock=SystemClock(),
        make_specs=lambda _settings, shm: specs(shm, kinds),
        when_ready=when_ready,
    )
    return exit_code(session.run, Console(stderr=True))


if __name__ == "__main__":
    sys.exit(main())
