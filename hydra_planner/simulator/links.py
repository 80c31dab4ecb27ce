"""Copies between devices share links: each device's way out and way in, and what all of them go through.

A copy runs at the least of its shares: of the source's way out, the target's way in, the fabric behind them; within one
device at its share of that device's copy rate. Shares are even, so a link that one copy cannot fill is not given to the
others: a lower bound of what max-min sharing reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hydra_planner.simulator.agenda import Agenda
from hydra_planner.simulator.costs import DeviceKind

_DONE_S = 1e-9  # of copying: less than this is rounding, and late in a long run less than a clock can tell


@dataclass(eq=False)
class _Copy:
    source: str
    target: str
    left: float  # bytes
    done: Callable[[], None]
    instance: str


class Links:
    """`devices`: the kind of each by name. `fabric_bytes_per_s` 0: links do not meet."""

    def __init__(self, agenda: Agenda, devices: Mapping[str, DeviceKind], fabric_bytes_per_s: float = 0.0) -> None:
        self._agenda = agenda
        self._devices = devices
        self._fabric = fabric_bytes_per_s
        self._copies: list[_Copy] = []
        self._settled_s = 0.0
        self._version = 0

    def copy(self, source: str, target: str, num_bytes: int, done: Callable[[], None], instance: str = "") -> None:
        """Copies from device to device for an instance; calls `done` when the last byte has arrived."""
        self._settle()
        self._copies.append(_Copy(source, target, float(num_bytes), done, instance))
        self._schedule()

    def drop(self, instance: str) -> None:
        """The instance has died: its copies are never done."""
        self._settle()
        self._copies = [copy for copy in self._copies if copy.instance != instance]
        self._schedule()

    def _rate(self, copy: _Copy) -> float:
        """Bytes per second."""
        if copy.source == copy.target:
            inside = sum(c.source == c.target == copy.source for c in self._copies)
            return self._devices[copy.source].copy_bytes_per_s / inside
        across = [c for c in self._copies if c.source != c.target]
        ways_out = self._devices[copy.source].link_bytes_per_s / sum(c.source == copy.source for c in across)
        ways_in = self._devices[copy.target].link_bytes_per_s / sum(c.target == copy.target for c in across)
        rate = min(ways_out, ways_in)
        return min(rate, self._fabric / len(across)) if self._fabric else rate

    def _settle(self) -> None:
        elapsed_s = self._agenda.now_s - self._settled_s
        self._settled_s = self._agenda.now_s
        if elapsed_s:
            for copy, rate in [(copy, self._rate(copy)) for copy in self._copies]:
                copy.left -= elapsed_s * rate

    def _schedule(self) -> None:
        self._version += 1
        if not self._copies:
            return
        version = self._version
        next_s = min(max(copy.left, 0.0) / self._rate(copy) for copy in self._copies)
        self._agenda.schedule_after(next_s, lambda: self._on_change(version))

    def _on_change(self, version: int) -> None:
        if version != self._version:
            return
        self._settle()
        ended = [copy for copy in self._copies if copy.left < _DONE_S * self._rate(copy)]
        self._copies = [copy for copy in self._copies if copy not in ended]
        self._schedule()
        for copy in ended:
            copy.done()
