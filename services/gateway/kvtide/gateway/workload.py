"""The load that a gateway served, as a file for ``kvtide plan`` and ``kvtide sim``.

Lengths, times and salted ids of blocks, and never text: see ``kvtide.kv.LoggedRequest``.
"""

import asyncio
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import structlog

from kvtide.bus.messages import RequestEnded
from kvtide.gateway.life import RequestSpec
from kvtide.gateway.observing import Observer
from kvtide.kv import BlockIds, BlockKey, KeySpace, LoggedRequest, RequestId
from kvtide.runtime import Clock

FLUSH_S = 1.0
_MOST_WAITING = 10_000

log = structlog.get_logger("kvtide.gateway")


@dataclass(frozen=True, slots=True)
class _Arrival:
    at_ms: float
    keys: tuple[BlockKey, ...]
    block_tokens: int


class WorkloadLog(Observer):
    """Keeps what has ended until ``flush`` appends it to the file, in a thread.

    A file that would outgrow ``most_bytes`` is renamed to ``NAME.1``, in place of the one
    before, and a new one begun. A file that can't be written costs lines, not requests.
    """

    def __init__(
        self, path: Path, ids: BlockIds, clock: Clock, *, most_bytes: int
    ) -> None:
        """Nothing is opened before the first request has ended."""
        self._path, self._ids, self._clock = path, ids, clock
        self._most_bytes = most_bytes
        self._open: dict[RequestId, _Arrival] = {}
        self._ended: deque[tuple[_Arrival, RequestEnded]] = deque()
        self.lost = 0

    def arrived(self, spec: RequestSpec, space: KeySpace) -> None:
        """See ``Observer``; ``ended`` will be told of it."""
        self._open[spec.request] = _Arrival(
            self._clock.wall() * 1000, spec.keys, space.layout.block_tokens
        )

    def ended(self, record: RequestEnded) -> None:
        """See ``Observer``."""
        arrival = self._open.pop(record.request, None)
        if arrival is None:
            return
        if len(self._ended) >= _MOST_WAITING:
            self._lose(1, "the file is too slow")
            return
        self._ended.append((arrival, record))

    async def run(self) -> None:
        """Flush for ever; the last ``flush`` is the owner's."""
        while True:
            await self._clock.sleep(FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Append what has ended so far."""
        taken = [self._ended.popleft() for _ in range(len(self._ended))]
        if not taken:
            return
        try:
            await asyncio.to_thread(self._append, taken)
        except OSError as error:
            self._lose(len(taken), str(error))

    def _append(self, taken: list[tuple[_Arrival, RequestEnded]]) -> None:
        text = b"".join(self._line(*each) for each in taken)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        descriptor = os.open(self._path, flags, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            size = file.seek(0, os.SEEK_END)
            if not size or size + len(text) <= self._most_bytes:
                file.write(text)
                return
        self._path.replace(self._path.with_name(self._path.name + ".1"))
        descriptor = os.open(self._path, flags, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            file.write(text)

    def _line(self, arrival: _Arrival, record: RequestEnded) -> bytes:
        return LoggedRequest(
            timestamp=arrival.at_ms,
            input_length=record.prompt_tokens,
            output_length=record.output_tokens,
            hash_ids=self._ids.of(arrival.keys),
            block_tokens=arrival.block_tokens,
            model=record.model,
        ).line()

    def _lose(self, lines: int, why: str) -> None:
        self.lost += lines
        log.warning("workload log lost lines", lines=lines, lost=self.lost, reason=why)
