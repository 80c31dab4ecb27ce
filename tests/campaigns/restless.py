"""An engine whose instances are started again at once however often they die, and what a process holds of the system.

For campaigns and tests that kill more often than the supervisor of a served engine puts up with.
"""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass
from pathlib import Path

from hydra_engine import Engine
from hydra_engine.cluster.member import Pace
from hydra_engine.cluster.supervisor import Supervisor
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

    descriptors: int
    memfds: int  # of the descriptors
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
    return Footprint(
        descriptors=len(targets),
        memfds=sum(target.startswith("/memfd:") for target in targets),
        mappings=sum("/memfd:" in line for line in (process / "maps").read_text().splitlines()),
        threads=len(os.listdir(process / "task")),
    )
