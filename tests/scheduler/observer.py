"""The observer of the schedulers under test."""

from __future__ import annotations

from importlib.util import find_spec
from pkgutil import resolve_name

from hydra_engine.scheduler.hooks import StepObserver


def step_observer() -> StepObserver:
    """The one that attributes late tokens; in a copy of the package without optional parts the no-op one."""
    if find_spec("hydra_engine.scheduler.latency") is None:
        return StepObserver()
    return resolve_name("hydra_engine.scheduler.latency.attribution:StepHistory")()
