"""What every process of kvtide stands on: clock, tasks, settings, logs, metrics."""

from kvtide.runtime.clock import Clock, ManualClock, SystemClock
from kvtide.runtime.errors import (
    ConfigError,
    KvtideError,
    LimitError,
    MissingSettingError,
)
from kvtide.runtime.names import random_node_name
from kvtide.runtime.tasks import TaskScope

__all__ = [
    "Clock",
    "ConfigError",
    "KvtideError",
    "LimitError",
    "ManualClock",
    "MissingSettingError",
    "SystemClock",
    "TaskScope",
    "random_node_name",
]
