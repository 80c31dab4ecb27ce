"""Engines that can be made to fail: after `enable`, `set_fault` arms fault points of their instances.

The engine has no message for that. Where this package is imported, in the process of the tests and in that of an
instance, frames to an instance may carry a `SetFault` too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from hydra_engine.cluster import channel
from hydra_engine.core.messages import ToInstance
from hydra_engine.core.processes import launch

if TYPE_CHECKING:
    from hydra_engine.frontend.frontend import Frontend


class SetFault(msgspec.Struct, frozen=True, tag=True):
    """Arms a named fault point of an instance."""

    point: str
    action: str
    argument: str = ""


channel._to_instance = msgspec.msgpack.Decoder(channel.Start | channel.Alike | ToInstance | SetFault)


def enable(patch: Any) -> None:
    """Gives fault points to all instances that are started from now on, until `patch` (a MonkeyPatch) is undone."""
    from hydra_engine.cluster.supervisor import Supervisor
    from tests.faults import run

    patch.setattr("hydra_engine.instance.build.run_instance", run.run_instance)
    patch.setitem(Supervisor.__init__.__kwdefaults__, "command", launch.command("tests.faults.instance"))


def set_fault(frontend: Frontend, point: str, action: str, argument: str = "", instance: str | None = None) -> None:
    """Arms a fault point of one instance, or of all if `instance` is None."""
    for name, link in list(frontend._links.items()):
        if instance in (None, name):
            link.end.send([SetFault(point, action, argument)])
