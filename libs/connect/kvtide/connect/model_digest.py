"""The digest of a model's folder: every byte of its configuration and weights."""

import json
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from kvtide.runtime import ConfigError

WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
# a model's own code computes by itself where it is trusted
CONFIGS = (".json", ".py")


def folder_digest(folder: Path, kept_in: Path | None = None) -> str:
    """Hex BLAKE3 over names and content of configuration, code and weight files.

    Folders inside it are not looked into: engines load what lies beside the weights.

    With ``kept_in`` the result is kept there, for as long as no file's size, time or
    inode changes: a large model is read once on a host, not once for each rank.

    Raises:
        ConfigError: the folder can't be read or holds no weights.
    """
    try:
        files = sorted(_files(folder))
        if not any(path.suffix in WEIGHTS for path in files):
            raise ConfigError(
                f"{folder} holds no weights; give 'model_digest'", key="model_digest"
            )
        stamp = _stamp(files)
        kept = None if kept_in is None else kept_in / f"{stamp}.digest"
        if kept is not None and kept.is_file():
            return kept.read_text(encoding="ascii")
        digest = _digest(files)
    except OSError as error:
        raise ConfigError(
            f"the model in {folder} can't be read: {error.strerror or error}",
            key="model_digest",
        ) from error
    if kept is not None:
        _keep(kept, digest)
    return digest


def folder_stamp(folder: Path) -> str:
    """Hex text that changes with any file's size, time or inode; reads no content.

    Raises:
        ConfigError: the folder can't be read.
    """
    try:
        return _stamp(sorted(_files(folder)))
    except OSError as error:
        raise ConfigError(
            f"the model in {folder} can't be read: {error.strerror or error}",
            key="model_digest",
        ) from error


def _files(folder: Path) -> Iterator[Path]:
    if folder.is_file():
        yield folder
        return
    for path in folder.iterdir():
        if path.is_file() and path.suffix in (*WEIGHTS, *CONFIGS):
            yield path


def _stamp(files: list[Path]) -> str:
    facts = [
        (str(path.resolve()), found.st_size, found.st_mtime_ns, found.st_ino)
        for path, found in ((path, path.stat()) for path in files)
    ]
    return blake3(json.dumps(facts).encode()).hexdigest(length=16)


def _digest(files: list[Path]) -> str:
    whole = blake3()
    for path in files:
        content = blake3(max_threads=blake3.AUTO)
        content.update_mmap(path)
        whole.update(len(path.name).to_bytes(8, "little") + path.name.encode())
        whole.update(content.digest())
    return whole.hexdigest()


def _keep(path: Path, digest: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{blake3(str(id(path)).encode()).hexdigest(4)}")
        fresh.write_text(digest, encoding="ascii")
        fresh.replace(path)
    except OSError:
        # it is made again next time
        return
