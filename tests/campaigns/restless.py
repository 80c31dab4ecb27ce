"""An engine whose instances are started again at once however often they die, and what a process holds of the system.

For campaigns and tests that kill more often than the supervisor of a served engine puts up with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from hydra_engine import Engine
from hydra_engine.cluster.member import Pace
from hydra_engine.cluster.supervisor import Supervisor
from hydra_engine.config.engine import MediaConfig
from hydra_engine.frontend.frontend import Frontend


class RestlessEngine(Engine):
    pace = Pace(backoff_s=(0.0,), max_failed_starts=1_000_000)

    async def _start(self, progress: bool | None) -> None:
        supervisor = Supervisor(self.config, processes=True, pace=self.pace)
        self._frontend = Frontend(self.config, processes=True, supervisor=supervisor)
        await self._frontend.start(lambda _loading: None)


@dataclass(frozen=True)
class Footprint:
    """Counts of one process, from /proc."""

    descriptors: int  # without those of `pixels`
    memfds: int  # of the descriptors
    pixels: int  # memfds of children that decode, at least one per child: made for its first picture, whenever that is
    mappings: int  # of shared memory without a name
    threads: int

    def grown(self, before: Footprint) -> bool:
        return any(now > then for now, then in zip(astuple(self), astuple(before), strict=True))


def footprint(pid: int) -> Footprint:
    """Raises FileNotFoundError or ProcessLookupError if it has ended."""
    process = Path(f"/proc/{pid}")
    targets = []
    for descriptor in os.listdir(process / "fd"):
        try:
            targets.append(os.readlink(process / "fd" / descriptor))
        except FileNotFoundError:
            continue  # closed meanwhile
    pixels = sum(target.startswith("/memfd:pixels") for target in targets)
    return Footprint(
        descriptors=len(targets) - pixels,
        memfds=sum(target.startswith("/memfd:") for target in targets) - pixels,
        pixels=max(pixels, MediaConfig().decode_workers),
        mappings=sum("/memfd:" in line for line in (process / "maps").read_text().splitlines()),
        threads=len(os.listdir(process / "task")),
    )


def growth(
    footprints: Callable[[], Mapping[str, Footprint]], before: Mapping[str, Footprint], within_s: float = 10.0
) -> list[str]:
    """Sentences on processes whose counts exceed those of before. What ended just now may take a moment to be freed."""
    deadline = time.monotonic() + within_s
    while True:
        after = footprints()
        grown = [f"{name} has {now}, before {before[name]}" for name, now in after.items() if now.grown(before[name])]
        if not grown or time.monotonic() > deadline:
            return grown
        time.sleep(0.05)
