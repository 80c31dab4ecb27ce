"""Which partition of a divided device the next language step runs on: the whole device, where vision runs beside it for
some seconds and then waits, or a part of it, where vision runs beside it all along on the rest.

SpaceServe (section 4.3) divides the multiprocessors once, before it serves. Here the partition follows from what there
is to do: few decodes are done in time on a small part, many are not. Moving costs little, since only the next launches
wait for the last ones, but an encode that runs stays where it is; so another partition has to be clearly better. Does
not know what makes one better.
"""

from __future__ import annotations

from collections.abc import Callable

LOOK = 8  # steps after which the other partitions are looked at again
GAIN = 1.05  # times the present one's rate that another one has to reach


class PartitionChoice:
    """Of `count` partitions, the undivided device, number 0, included."""

    def __init__(self, count: int) -> None:
        self.partition = 0
        self._count = count
        self._steps = LOOK

    def choose(self, rate: Callable[[int], float]) -> int:
        """Of the step that is being planned. `rate(p)`: the seconds of work, by what it takes alone, that are done in
        a second on partition p; 0 where the step would miss its limit. Where all would, vision waits on the undivided
        device."""
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
