"""A budget for bytes that clients make the process hold. A request that does not fit is refused at once instead of
waiting, so no holder ever waits for more. Does not know what the bytes are.
"""

from __future__ import annotations


class ByteBudget:
    """A budget of `most` bytes in which the leases of one client never hold more than they leave free: one client alone
    gets at most half, each of two a third, and a new client always finds space. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held = 0
        self._held_by: dict[str, int] = {}  # bytes by client, without zeros

    def fits(self, num_bytes: int, client: str | None = None) -> bool:
        """True if `num_bytes` more fit. `client` None: only the total is checked, not a client's share."""
        left = self.max_bytes - self.held - num_bytes
        return left >= (0 if client is None else self._held_by.get(client, 0) + num_bytes)

    def lease(self, client: str | None = None) -> Lease:
        return Lease(self, client)

    def change(self, num_bytes: int, client: str | None) -> None:
        """Adds `num_bytes` (or subtracts, if negative). Called by leases only."""
        self.held += num_bytes
        if client is not None:
            now = self._held_by.get(client, 0) + num_bytes
            if now:
                self._held_by[client] = now
            else:
                self._held_by.pop(client, None)


class Lease:
    """The bytes that one user holds. `release` returns all of them and may be called again."""

    __slots__ = ("_budget", "client", "held")

    def __init__(self, budget: ByteBudget, client: str | None) -> None:
        self._budget = budget
        self.client = client
        self.held = 0

    def fits(self, num_bytes: int) -> bool:
        """True if `reserve` would succeed."""
        return self._budget.fits(num_bytes, self.client)

    def reserve(self, num_bytes: int) -> bool:
        """Takes bytes; False, and nothing taken, if they do not fit."""
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
