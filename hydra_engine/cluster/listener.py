"""What the supervisor tells the front, and the link to one instance that it hands out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hydra_engine.cluster.channel import FrontEnd
from hydra_engine.core.messages import InstanceSummary, Loading, ToFront
from hydra_engine.core.roles import Role


@dataclass(frozen=True, slots=True)
class InstanceLink:
    """One life of an instance. `end.send` belongs to the front's loop and is harmless after the instance's death."""

    name: str
    role: Role  # what it has weights for
    device: str  # as configured
    incarnation: int
    end: FrontEnd
    summary: InstanceSummary
    pid: int | None  # None: a thread of this process


class ClusterListener(Protocol):
    """All calls are made on the loop that called `Supervisor.start`, and must not block it."""

    def on_progress(self, name: str, loading: Loading) -> None: ...

    def on_messages(self, name: str, messages: list[ToFront]) -> None:
        """Messages of the live incarnation, but for Loading, Ready, Failed and PeerState."""
        ...

    def on_up(self, link: InstanceLink) -> None:
        """The instance is ready, for the first time or again. Connections to others follow, each with `on_pair`."""
        ...

    def on_down(self, name: str, reason: str, *, restarts: bool) -> None:
        """The instance died or was killed; nothing of that incarnation comes later. Again for each death before it was
        ready. `reason` is what follows its name in a sentence."""
        ...

    def on_silent(self, name: str, silent: bool) -> None:
        """The instance has been silent for `suspect_s`; with False, it is silent no more. A death ends this too."""
        ...

    def on_pair(self, one: str, other: str, up: bool) -> None:
        """Whether blocks can be exchanged: both sides have said so. Names in the order of the topology. A pair goes
        down before an instance of it does."""
        ...
