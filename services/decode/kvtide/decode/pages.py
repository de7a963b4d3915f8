"""Memory, counted in pages of one block. Pure."""

from kvtide.kv import RequestRef


class PageLedger:
    """Who has how many pages. ``used`` is always the sum of what is bound."""

    def __init__(self, capacity: int) -> None:
        """``capacity`` pages in all."""
        self.capacity = capacity
        self._bound: dict[RequestRef, int] = {}
        self._used = 0

    @property
    def used(self) -> int:
        """Pages that are bound."""
        return self._used

    @property
    def free(self) -> int:
        """Pages that are not."""
        return self.capacity - self._used

    @property
    def holders(self) -> int:
        """Requests that have pages."""
        return len(self._bound)

    def bind(self, ref: RequestRef, pages: int) -> bool:
        """Give ``pages`` to ``ref``, all or none; whether they were there.

        Raises:
            ValueError: it has pages already, or asks for none.
        """
        if ref in self._bound or pages < 1:
            raise ValueError(f"{ref} can't be given {pages} pages")
        if pages > self.free:
            return False
        self._bound[ref] = pages
        self._used += pages
        return True

    def of(self, ref: RequestRef) -> int:
        """Pages that ``ref`` has; 0 if none."""
        return self._bound.get(ref, 0)

    def grow(self, ref: RequestRef, pages: int) -> bool:
        """Give ``ref`` so many that it has ``pages``, all or none; whether it has.

        Raises:
            KeyError: it has none so far.
        """
        more = pages - self._bound[ref]
        if more > self.free:
            return False
        if more > 0:
            self._bound[ref] = pages
            self._used += more
        return True

    def release(self, ref: RequestRef) -> None:
        """Take the pages of ``ref`` back.

        Raises:
            KeyError: it has none.
        """
        self._used -= self._bound.pop(ref)
