"""How a region of a peer is reached: as a file, by shared memory, or by the network."""

from collections.abc import Sequence

from kvtide.transfer.copier import SharedMover
from kvtide.transfer.files import PREFIX, FileMover
from kvtide.transfer.handles import RegionHandle


class Routes:
    """See the module; ``shared`` is None where the peer is on another host."""

    def __init__(self, files: FileMover, shared: SharedMover | None) -> None:
        """Of one peer."""
        self._files = files
        self._shared = shared

    def of(self, handle: RegionHandle, *, writes: bool) -> str:
        """By "file", by "shm", or by "tcp": that is, by the network."""
        name, shared = handle.shm_name, self._shared
        if name.startswith(PREFIX):
            files = self._files
            if not files.near(name):
                files.detours.say("its files are on another host")
                return "tcp"
            return "tcp" if (handle, writes) in files.detours else "file"
        if shared is None:
            return "tcp"
        if not name:
            shared.detours.say("it was registered, not allocated in shared memory")
            return "tcp"
        return "tcp" if (handle, writes) in shared.detours else "shm"

    def of_all(self, handles: Sequence[RegionHandle], *, writes: bool) -> list[str]:
        """``of`` each."""
        if not handles:
            return []
        first = handles[0]
        if handles.count(first) == len(handles):
            return [self.of(first, writes=writes)] * len(handles)
        return [self.of(handle, writes=writes) for handle in handles]
