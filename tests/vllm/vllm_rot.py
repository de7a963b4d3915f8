"""Blocks that rot where a store keeps them."""

from pathlib import Path


def rot_all(shm_dir: Path) -> None:
    """Change bytes in every slab of the stores."""
    for path in shm_dir.rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 20:
            rot(path)


def rot(path: Path) -> None:
    """Change a byte in each 64 KiB that hold any."""
    with path.open("r+b") as file:
        for start in range(0, path.stat().st_size, 1 << 16):
            file.seek(start + 40_000)
            byte = file.read(1)
            if byte and byte != b"\0":
                file.seek(start + 40_000)
                file.write(bytes([byte[0] ^ 0x55]))
