"""The table of experiments by name."""

from __future__ import annotations

from difflib import get_close_matches

from hydra_engine.errors import ConfigError
from hydra_planner.papers import epd_serve_table, epd_table, heteroserve, hydrainfer_table
from hydra_planner.papers.results import Experiment

EXPERIMENTS = (
    *heteroserve.EXPERIMENTS,
    *epd_table.EXPERIMENTS,
    *hydrainfer_table.EXPERIMENTS,
    *epd_serve_table.EXPERIMENTS,
)
_BY_NAME = {experiment.name: experiment for experiment in EXPERIMENTS}


def find(name: str) -> Experiment:
    """Raises ConfigError."""
    found = _BY_NAME.get(name.lower())
    if found is not None:
        return found
    near = get_close_matches(name.lower(), _BY_NAME, n=1, cutoff=0.5)
    advice = f"did you mean {near[0]}?" if near else "`hydra-engine reproduce` lists them"
    raise ConfigError(f"there is no experiment {name[:40]!r}; {advice}", param="name")
