"""The seam in front of transfer engines of others: what they must do for us, no more.

An engine moves bytes between memory that was registered with it at both ends. It is
trusted with that alone: it reaches only slots of our own (``slabs``), never a region nor
memory of a caller, and what it brings counts only once its checksum was compared.
"""

from abc import ABC, abstractmethod


class Flight(ABC):
    """One transfer of an engine. For one thread."""

    @abstractmethod
    def landed(self) -> bool:
        """Whether all bytes have been moved; to be asked until it is true.

        Raises:
            Unreachable: the engine gave up; the memory is not touched any more.
        """

    @abstractmethod
    def over(self) -> bool:
        """``landed`` for who has given up: true however it ended."""


class Engine(ABC):
    """A transfer engine in this process. Thread-safe once open."""

    name: str
    """As the path of transfers that it carries."""

    @abstractmethod
    def open(self, host: str) -> None:
        """Start it; peers reach this machine at ``host``.

        Raises:
            Refused: its package is not installed, with what to do; or it does not start.
        """

    @abstractmethod
    def register(self, address: int, length: int) -> None:
        """Let it reach memory, which must stay in place until ``close``.

        Raises:
            Refused: it does not take it.
        """

    @abstractmethod
    def describe(self, address: int, length: int) -> bytes:
        """What a peer's engine must know to reach registered memory."""

    @abstractmethod
    def meet(self, description: bytes) -> str:
        """The engine of a peer that proved itself, by the name to ``begin`` with.

        Raises:
            Refused: the description is of no use.
        """

    @abstractmethod
    def begin(
        self, peer: str, *, writes: bool, here: int, there: int, length: int
    ) -> Flight:
        """Start to copy between registered memory here and there.

        Raises:
            Unreachable: it can't.
        """

    @abstractmethod
    def close(self) -> None:
        """End it: registered memory is touched no more."""
