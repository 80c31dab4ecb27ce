"""Counts bytes that strangers make us hold, and says when there are too many. Does not know what they are or who waits:
what does not fit is refused at once, so that nobody who holds some ever waits for more.
"""

from __future__ import annotations


class ByteBudget:
    """Not thread-safe; each user owns a `Lease`. One client's leases together never hold more than they leave free: a
    client alone has half of it all, each of two a third, and there is always room for one more."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self._held_by: dict[str, int] = {}  # clients that hold something

    def fits(self, num_bytes: int, client: str | None = None) -> bool:
        """`client` None: whoever that is keeps the shares of others."""
        left = self.most - self.held - num_bytes
        return left >= (0 if client is None else self._held_by.get(client, 0) + num_bytes)

    def lease(self, client: str | None = None) -> Lease:
        return Lease(self, client)

    def change(self, num_bytes: int, client: str | None) -> None:
        """For leases."""
        self.held += num_bytes
        if client is not None:
            now = self._held_by.get(client, 0) + num_bytes
            if now:
                self._held_by[client] = now
            else:
                self._held_by.pop(client, None)


class Lease:
    """What one user holds; `release` gives all of it back and may be called again."""

    __slots__ = ("_budget", "client", "held")

    def __init__(self, budget: ByteBudget, client: str | None) -> None:
        self._budget = budget
        self.client = client
        self.held = 0

    def fits(self, num_bytes: int) -> bool:
        """Whether `take` would."""
        return self._budget.fits(num_bytes, self.client)

    def take(self, num_bytes: int) -> bool:
        """False, with nothing taken, when that would be too much."""
        if not self.fits(num_bytes):
            return False
        self._budget.change(num_bytes, self.client)
        self.held += num_bytes
        return True

    def release(self) -> None:
        self._budget.change(-self.held, self.client)
        self.held = 0

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
