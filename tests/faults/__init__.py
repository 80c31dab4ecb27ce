"""Engines that can be made to fail: after `enable`, `Frontend.set_fault` arms fault points of their instances."""

from __future__ import annotations

from typing import Any

from hydra_engine.cluster.supervisor import Supervisor
from hydra_engine.core.processes import launch


def enable(patch: Any) -> None:
    """Gives fault points to all instances that are started from now on, until `patch` (a MonkeyPatch) is undone."""
    from tests.faults import run

    patch.setattr("hydra_engine.instance.build.run_instance", run.run_instance)
    patch.setitem(Supervisor.__init__.__kwdefaults__, "command", launch.command("tests.faults.instance"))
