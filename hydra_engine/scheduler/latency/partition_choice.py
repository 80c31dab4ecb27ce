"""The choice of a device partition for the next language step: the whole device, where vision runs beside it for some
seconds and then waits, or a part of it, where vision runs beside it all along on the rest.

SpaceServe (section 4.3) divides the SMs once, before it serves. Here the partition follows from the work: few decodes
finish in time on a small part, many do not. A change costs little, since only the next launches wait for the last ones,
but an encode in flight stays on its partition; so another partition has to be clearly better. Does not know how a
partition is rated.
"""

from __future__ import annotations

from collections.abc import Callable

LOOK = 8  # steps after which the other partitions are rated again
GAIN = 1.05  # multiple of the current rate that another partition has to exceed


class PartitionChoice:
    """A choice among `count` partitions; number 0 is the undivided device."""

    def __init__(self, count: int) -> None:
        self.partition = 0
        self._count = count
        self._steps = LOOK

    def choose(self, rate: Callable[[int], float]) -> int:
        """The partition of the step that is being planned. `rate(p)`: work done per second on partition p, the work
        measured in seconds that it takes alone; 0 if the step would miss its limit. If all rates are 0, it is the
        undivided device, where vision waits."""
        self._steps += 1
        present = rate(self.partition)
        if present and self._steps < LOOK:
            return self.partition
        self._steps = 0
        rates = [present if number == self.partition else rate(number) for number in range(self._count)]
        best = max(range(self._count), key=rates.__getitem__)
        if rates[best] > GAIN * present or not present:
            self.partition = best
        return self.partition
