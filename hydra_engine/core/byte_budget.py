"""Counts bytes that strangers make us hold, and says when there are too many. Does not know what they are or who waits:
what does not fit is refused at once, so that nobody who holds some ever waits for more.
"""

from __future__ import annotations


class ByteBudget:
    """Not thread-safe; each user owns a `Lease`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0

    def fits(self, num_bytes: int) -> bool:
        return self.held + num_bytes <= self.most

    def lease(self) -> Lease:
        return Lease(self)


class Lease:
    """What one user holds; `release` gives all of it back and may be called again."""

    __slots__ = ("_budget", "held")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.held = 0

    def take(self, num_bytes: int) -> bool:
        """False, with nothing taken, when that would be too much."""
        if not self._budget.fits(num_bytes):
            return False
        self._budget.held += num_bytes
        self.held += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """A part of what is held."""
        assert 0 <= num_bytes <= self.held
        self._budget.held -= num_bytes
        self.held -= num_bytes

    def release(self) -> None:
        self._budget.held -= self.held
        self.held = 0

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
