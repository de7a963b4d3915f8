"""Memory, shared memory, disk, processors and limits of this machine."""

import os
import resource
import shutil
from pathlib import Path

import psutil

from kvtide.cli.doctor.findings import Finding, Level
from kvtide.cli.sizes import size
from kvtide.cli.supervisor.nats_server import find_nats_server
from kvtide.runtime import ConfigError
from kvtide.transfer import shm_host

LEAST_MEMORY_BYTES = 2 << 30
LEAST_SHM_BYTES = 512 << 20
LEAST_DISK_BYTES = 2 << 30
LEAST_FILES = 4096
LEAST_MEMLOCK_BYTES = 64 << 20


def memory() -> Finding:
    """Free memory for a model and its KV."""
    return judge_memory(psutil.virtual_memory().available)


def judge_memory(available: int) -> Finding:
    """The demo's workers take about a gigabyte each."""
    text = f"{size(available)} available"
    if available < LEAST_MEMORY_BYTES:
        advice = f"free some: each worker loads the model ({size(LEAST_MEMORY_BYTES)} for the demo)"
        return Finding("memory", Level.WARN, text, advice)
    return Finding("memory", Level.OK, text)


def processors() -> Finding:
    """Processors that this process may use."""
    count = len(os.sched_getaffinity(0))
    return Finding("processors", Level.OK, f"{count} usable")


def shared_memory(folder: Path | None) -> Finding:
    """The folder for KV blocks of a host's roles."""
    if folder is None:
        text = "switched off: KV goes over TCP, also on this host"
        advice = "set shm_dir to a folder on tmpfs"
        return Finding("shared memory", Level.WARN, text, advice)
    if not folder.is_dir() or not shm_host(folder):
        return Finding(
            "shared memory",
            Level.FAIL,
            f"{folder} can't be written",
            "set shm_dir to a folder on tmpfs that all roles of this host may write",
        )
    usage = shutil.disk_usage(folder)
    return judge_shared_memory(folder, _file_system(folder), usage.total, usage.free)


def judge_shared_memory(
    folder: Path, file_system: str, total: int, free: int
) -> Finding:
    """Containers get 64 MiB by default, which is too little for any pool."""
    text = f"{folder} ({file_system or 'unknown'}): {size(free)} of {size(total)} free"
    if file_system and file_system != "tmpfs":
        advice = "it is not in memory: mount a tmpfs there, or set shm_dir to one"
        return Finding("shared memory", Level.WARN, text, advice)
    if free < LEAST_SHM_BYTES:
        advice = (
            f"make it larger (mount -o remount,size=2G {folder}; docker: --shm-size, "
            "or a tmpfs volume), or give the store less DRAM"
        )
        return Finding("shared memory", Level.WARN, text, advice)
    return Finding("shared memory", Level.OK, text)


def disk(state_dir: Path) -> Finding:
    """Room for the catalog, logs and blocks on SSD."""
    there = state_dir
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK):
        advice = "choose another folder with --state-dir, or change its owner"
        return Finding("disk", Level.FAIL, f"{there} can't be written", advice)
    return judge_disk(there, shutil.disk_usage(there).free)


def judge_disk(folder: Path, free: int) -> Finding:
    """See ``disk``."""
    text = f"{size(free)} free at {folder}"
    if free < LEAST_DISK_BYTES:
        advice = f"free some: {size(LEAST_DISK_BYTES)} or more are wanted"
        return Finding("disk", Level.WARN, text, advice)
    return Finding("disk", Level.OK, text)


def open_files() -> Finding:
    """The limit on open files, which sockets count in."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return judge_open_files(soft, hard)


def judge_open_files(soft: int, hard: int) -> Finding:
    """A gateway needs one for each client."""
    text = f"{soft} (may be raised to {hard})"
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        advice = f"ulimit -n {LEAST_FILES}: each client of a gateway takes one"
        return Finding("open files", Level.WARN, text, advice)
    return Finding("open files", Level.OK, text)


def locked_memory(*, wanted: bool) -> Finding:
    """Memory that may be locked, which registering it for RDMA does."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    text = "unlimited" if unlimited else size(soft)
    if wanted and not unlimited and soft < LEAST_MEMLOCK_BYTES:
        advice = "ulimit -l unlimited (docker: --ulimit memlock=-1), for RDMA"
        return Finding("locked memory", Level.WARN, text, advice)
    return Finding("locked memory", Level.OK, text)


def nats_binary() -> Finding:
    """The server that ``kvtide up`` starts."""
    try:
        return Finding("nats-server", Level.OK, str(find_nats_server()))
    except ConfigError as error:
        return Finding("nats-server", Level.WARN, "not installed", str(error))


def _file_system(folder: Path) -> str:
    """The type of the file system that holds ``folder``, by the longest mount point."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    target = str(folder.resolve())
    best, kind = "", ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind
