"""The process that an engine runs in: a forked child has its objects, but neither its threads nor its event loop."""

from __future__ import annotations

import os

from hydra_engine.errors import EngineClosed


class Owner:
    """The process that created this object."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        return self._pid == os.getpid()

    def check(self) -> None:
        """Raises EngineClosed in a forked child, which would wait for ever."""
        if not self.is_here:
            raise EngineClosed(
                f"this engine runs in process {self._pid}, of which this one is a forked child; make an Engine here, "
                "or start the child with multiprocessing's spawn method"
            )
