"""The faults of ``make soak``: one at a time, drawn, each undone before the next."""

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.link import CLEAR, SILENT, Link, Weather, rewrite
from tests.chaos.shuffle import Shuffled
from tests.chaos.site import ROLES, ChaosSite
from tests.chaos.spoil import fill, flip
from tests.e2e.system import wait_for

PEACE_S = (5.0, 20.0)
FAULT_S = (2.0, 12.0)
READY_LIMIT_S = 180.0
FLIPS = 4


@dataclass
class Faults:
    """Does random things to the site, one at a time, and undoes them."""

    site: ChaosSite
    chance: random.Random
    done: Counter[str] = field(default_factory=Counter[str])

    def one(self) -> None:
        """A fault from its beginning to its end; every process is ready after it."""
        kinds: Sequence[Callable[[], str]] = (
            *(self._kill, self._kill, self._stop, self._end),
            *(self._cut_off, self._half_open, self._nats, self._messages),
            *(self._transfers, self._corrupt, self._flips),
            *(self._disk_fails, self._disk_full, self._memory_full),
            *(self._database, self._database_killed),
            *(self._clients_vanish, self._clients_held),
        )
        self.done[self.chance.choice(kinds)()] += 1
        wait_for(self.site.ready, READY_LIMIT_S, "every process is ready again")

    def rest(self, span_s: tuple[float, float]) -> None:
        time.sleep(self.chance.uniform(*span_s))

    def _name(self) -> str:
        return f"{self.chance.choice(ROLES)}-{self.chance.randrange(2)}"

    def _kill(self) -> str:
        name = self._name()
        self.site.kill(name)
        self.rest((0.5, 5.0))
        self.site.restart(name)
        return f"kill -9 of a {name[:-2]}"

    def _stop(self) -> str:
        name = self._name()
        self.site.stop(name)
        self.rest(FAULT_S)
        self.site.go_on(name)
        return f"stop of a {name[:-2]}"

    def _end(self) -> str:
        name = self._name()
        self.site.cluster[name].send(signal.SIGTERM)
        self.site.cluster[name].wait(60)
        self.site.restart(name)
        return f"orderly restart of a {name[:-2]}"

    def _under(self, links: Sequence[Link], weather: Weather) -> None:
        for link in links:
            link.set(weather)
        self.rest(FAULT_S)
        for link in links:
            link.set(CLEAR)

    def _cut_off(self) -> str:
        host = self.chance.randrange(2)
        ends = [n for n in self.site.cluster.to_nats if n.endswith(f"-{host}")]
        self._under([self.site.cluster.to_nats[name] for name in ends], SILENT)
        return "a host cut off from NATS"

    def _transfers(self) -> str:
        self._under(list(self.site.cluster.to_transfer.values()), SILENT)
        return "transfers between hosts silent"

    def _corrupt(self) -> str:
        weather = Weather(corrupt=0.2)
        self._under(list(self.site.cluster.to_transfer.values()), weather)
        return "bits flipped in transfers"

    def _nats(self) -> str:
        self.site.cluster.nats.kill()
        self.rest((0.5, 5.0))
        self.site.cluster.nats.start()
        return "kill -9 of nats-server"

    def _database(self) -> str:
        self._under([self.site.to_postgres], SILENT)
        return "PostgreSQL silent"

    def _database_killed(self) -> str:
        self.site.postgres.kill()
        self.rest(FAULT_S)
        self.site.postgres.restart()
        return "kill -9 of PostgreSQL"

    def _half_open(self) -> str:
        host = self.chance.randrange(2)
        for name, link in self.site.cluster.to_nats.items():
            if name.endswith(f"-{host}"):
                link.half_open()
        self.rest(FAULT_S)
        return "a host's connections to NATS half open"

    def _messages(self) -> str:
        links = list(self.site.cluster.to_nats.values())
        seed = self.chance.randrange(1 << 31)
        rewrite(links, lambda: Shuffled(random.Random(seed)))  # noqa: S311 - as above
        self.rest(FAULT_S)
        rewrite(links, None)
        return "messages twice and in another order"

    def _flips(self) -> str:
        for _ in range(FLIPS):
            for host in range(2):
                for file in self.site.cluster.shm_dir(host).rglob("*"):
                    if file.is_file() and file.stat().st_size:
                        flip(file, self.chance, FLIPS)
            self.rest((0.5, 1.5))
        return "bits flipped in both arenas"

    def _disk_fails(self) -> str:
        host = self.chance.randrange(2)
        control = self.site.behind(host) / ".fail"
        control.write_text(self.chance.choice(("write", "read write")))
        self.rest(FAULT_S)
        control.unlink()
        # a disk that failed is not trusted until the store starts anew
        self.site.kill(f"store-{host}")
        self.site.restart(f"store-{host}")
        return "EIO of a host's disk"

    def _filled(self, filler: Path) -> None:
        fill(filler)
        self.rest(FAULT_S)
        filler.unlink()

    def _disk_full(self) -> str:
        self._filled(self.site.behind(self.chance.randrange(2)) / "filler")
        return "a host's disk full"

    def _memory_full(self) -> str:
        self._filled(self.site.cluster.memory(self.chance.randrange(2)) / "filler")
        return "a host's /dev/shm full"

    def _clients_vanish(self) -> str:
        self.site.cluster.to_gateway[f"gateway-{self.chance.randrange(2)}"].vanish()
        return "all clients of a gateway vanish"

    def _clients_held(self) -> str:
        links = list(self.site.cluster.to_gateway.values())
        self._under(links, Weather(hold_down=True))
        return "answers held back on their way to clients"
