"""How much memory the arena may have, and how it gives some back."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtide.kv import TenantId, tenant_tag
from kvtide.runtime import SystemClock
from kvtide.store.arena import Arena, arena_bytes
from kvtide.store.eviction import Policy
from kvtide.store.host import HostReading, HostRules, arena_limit
from kvtide.store.host_reading import HostMemory
from kvtide.store.host_watch import HostWatch
from kvtide.store.setting_rules import host_rules, store_rules
from kvtide.store.settings import StoreSettings
from kvtide.store.slots import SlotTable
from kvtide.transfer import Endpoint

GIB = 1 << 30
RULES = HostRules(
    reserve_bytes=GIB, pressure_percent=20, step_bytes=GIB // 2, floor_bytes=GIB // 4
)


@pytest.mark.parametrize(
    ("available", "pressure", "backed", "limit"),
    [
        (10 * GIB, 0.0, 3 * GIB, 8 * GIB),
        (4 * GIB, 0.0, 3 * GIB, 5 * GIB),
        (GIB * 3 // 2, 0.0, 3 * GIB, 3 * GIB),
        (GIB, None, 3 * GIB, 3 * GIB),
        (GIB - 1, 0.0, 3 * GIB, 3 * GIB - GIB // 2),
        (0, 0.0, 3 * GIB, 3 * GIB - GIB // 2),
        (0, 0.0, GIB // 2, GIB // 4),
        (0, 0.0, 0, GIB // 4),
        (10 * GIB, 21.0, 3 * GIB, 3 * GIB - GIB // 2),
        (None, None, 3 * GIB, 8 * GIB),
        (None, 30.0, 3 * GIB, 3 * GIB - GIB // 2),
    ],
)
def test_the_host_comes_first(
    available: int | None, pressure: float | None, backed: int, limit: int
) -> None:
    reading = HostReading(available, pressure)
    found = arena_limit(RULES, reading, backed_bytes=backed, arena_bytes=8 * GIB)
    assert found == limit


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def host(root: Path, available_kib: int = 4 << 20) -> None:
    write(
        root / "proc/meminfo",
        f"MemTotal:  16777216 kB\nMemFree: 1 kB\nMemAvailable: {available_kib} kB\n",
    )
    write(
        root / "proc/pressure/memory",
        "some avg10=12.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=9.00\n",
    )


def test_the_hosts_memory_is_read(tmp_path: Path) -> None:
    host(tmp_path)
    memory = HostMemory(tmp_path)
    assert memory.read() == HostReading(4 * GIB, 12.5)
    assert memory.total_bytes() == 16 * GIB


def test_the_smallest_control_group_counts(tmp_path: Path) -> None:
    host(tmp_path)
    write(tmp_path / "proc/self/cgroup", "0::/kube/pod\n")
    groups = tmp_path / "sys/fs/cgroup"
    write(groups / "kube/memory.max", f"{3 * GIB}\n")
    write(groups / "kube/memory.current", f"{GIB}\n")
    write(groups / "kube/pod/memory.max", f"{2 * GIB}\n")
    write(groups / "kube/pod/memory.current", f"{GIB}\n")
    write(groups / "kube/pod/memory.stat", f"anon 5\ninactive_file {GIB // 2}\n")
    memory = HostMemory(tmp_path)
    assert memory.read().available_bytes == GIB + GIB // 2
    assert memory.total_bytes() == 2 * GIB
    write(groups / "kube/pod/memory.max", "max\n")
    assert HostMemory(tmp_path).read().available_bytes == 2 * GIB


def test_an_old_control_group_counts_too(tmp_path: Path) -> None:
    host(tmp_path)
    write(tmp_path / "proc/self/cgroup", "5:cpu:/x\n4:memory:/docker/1\n0::/\n")
    group = tmp_path / "sys/fs/cgroup/memory"
    write(group / "memory.limit_in_bytes", f"{GIB}\n")
    write(group / "memory.usage_in_bytes", f"{GIB // 4}\n")
    assert HostMemory(tmp_path).read().available_bytes == GIB - GIB // 4


def test_where_nothing_can_be_read_nothing_is_known(tmp_path: Path) -> None:
    memory = HostMemory(tmp_path)
    assert memory.read() == HostReading(None, None)
    assert memory.total_bytes() is None


def test_this_machine_can_be_read() -> None:
    memory = HostMemory()
    available, total = memory.read().available_bytes, memory.total_bytes()
    assert available is not None
    assert total is not None
    assert 0 < available <= total


def test_the_default_size_respects_a_control_group(tmp_path: Path) -> None:
    assert arena_bytes(0, tmp_path, 1 << 20) == 1 << 19
    assert arena_bytes(1 << 20, tmp_path, 1 << 20) == 1 << 20


def test_settings_become_rules() -> None:
    secret = b"s" * 32
    settings = StoreSettings(
        eviction="s3fifo",
        tenant_weights={"big": 3.0},
        tenant_limit_bytes={"small": 5},
        host_reserve_bytes=7,
    )
    rules = store_rules(settings, 4096, secret)
    assert rules.table.policy is Policy.S3_FIFO
    shares = rules.table.shares
    assert shares.weights == {tenant_tag(secret, TenantId("big")): 3.0}
    assert shares.limits_bytes == {tenant_tag(secret, TenantId("small")): 5}
    assert host_rules(settings, 100 * GIB).reserve_bytes == 7
    assert host_rules(StoreSettings(), 10 * GIB).reserve_bytes == GIB // 5
    assert host_rules(StoreSettings(), 100 * GIB).reserve_bytes == GIB


async def test_real_memory_goes_back_to_the_host_and_comes_again(
    tmp_path: Path,
) -> None:
    folder = Path("/dev/shm")  # noqa: S108 - real shared memory
    async with Endpoint(
        node="store", epoch=1, secret=b"s" * 32, clock=SystemClock(), shm_dir=folder
    ) as endpoint:
        arena = Arena(endpoint, 8 << 20)
        path = folder / arena.readable().shm_name
        table = SlotTable(
            8 << 20, slab_bytes=1 << 20, back=arena.back, give_back=arena.give_back
        )

        def resident() -> int:
            return path.stat().st_blocks * 512

        slots: list[int] = []
        while (slot := table.take(100_000, space=0, tokens=1)) is not None:
            offset = table.offset(slot)
            arena.view[offset : offset + 100_000] = bytes([len(slots) + 1]) * 100_000
            table.commit(slot, 1)
            slots.append(slot)
        assert resident() > 7 << 20
        while victims := table.limit_memory(3 << 20):
            for slot in victims:
                table.free(slot)
                slots.remove(slot)
        assert resident() == table.backed_bytes <= 3 << 20
        assert len(slots) > 20
        for slot in slots:
            offset = table.offset(slot)
            assert arena.view[offset] == arena.view[offset + 99_999] > 0
        while table.take(100_000, space=0, tokens=1) is not None:
            assert table.backed_bytes <= 3 << 20
        table.limit_memory(8 << 20)
        while table.take(100_000, space=0, tokens=1) is not None:
            pass
        assert resident() == table.backed_bytes > 7 << 20
        await arena.close()


class Steps(SystemClock):
    """Between two readings one step happens; after the last the watch ends."""

    def __init__(self, *steps: Callable[[], None]) -> None:
        self.steps = list(steps)

    async def sleep(self, seconds: float) -> None:
        if not self.steps:
            raise asyncio.CancelledError
        self.steps.pop(0)()


async def test_the_watch_says_what_is_news(tmp_path: Path) -> None:
    host(tmp_path, available_kib=8 << 20)
    backed, limits = [GIB], list[int]()

    def limit(limit_bytes: int) -> None:
        limits.append(limit_bytes)
        backed[0] = min(backed[0], limit_bytes)

    steps = Steps(
        lambda: None,
        lambda: host(tmp_path, available_kib=512 << 10),
        lambda: None,
        lambda: host(tmp_path, available_kib=8 << 20),
    )
    watch = HostWatch(steps, HostMemory(tmp_path), RULES, every_s=1.0)
    with pytest.raises(asyncio.CancelledError):
        await watch.run(4 * GIB, lambda: backed[0], limit)
    assert limits == [GIB // 2, GIB // 4, 4 * GIB]
