"""That a store was drained, kept in a file: whoever starts it again has it stay out."""

from dataclasses import dataclass
from pathlib import Path

import structlog

log = structlog.get_logger("kvtide.store")


@dataclass(frozen=True, slots=True)
class DrainedMark:
    """See the module. Without a path nothing is kept. Never raises."""

    path: Path | None = None

    def is_set(self) -> bool:
        """Whether the store was drained, and not told to stay since."""
        return self.path is not None and self.path.exists()

    def set(self) -> None:
        """It is about to leave."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
        except OSError as error:
            log.warning("drain_not_kept", path=str(self.path), error=str(error))

    def clear(self) -> None:
        """It stays after all."""
        if self.path is None:
            return
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("drain_not_cleared", path=str(self.path), error=str(error))
