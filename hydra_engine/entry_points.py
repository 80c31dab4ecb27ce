"""Entry points: what other packages add to the engine, which does not know their names."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

_PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def load_entry_points(group: str) -> dict[str, Any]:
    """The objects in a group by name, imported.

    In a source tree, installed or not, they are those that its pyproject.toml declares. Elsewhere they are those of all
    installed distributions.
    """
    declared = _declared_here(group)
    if declared is None:
        from importlib.metadata import entry_points  # takes a third of the time of `hydra-engine --help`

        return {point.name: point.load() for point in entry_points(group=group)}
    found = {}
    for name, value in declared.items():
        module, _, attribute = value.partition(":")
        found[name] = getattr(import_module(module), attribute)
    return found


def _declared_here(group: str) -> dict[str, str] | None:
    """ "module:attribute" by name, or None outside a source tree of the engine."""
    try:
        text = _PROJECT.read_text(encoding="utf-8")
    except OSError:
        return None
    import tomllib

    project = tomllib.loads(text).get("project", {})
    if project.get("name") != "hydra-engine":  # a stray file in site-packages
        return None
    declared: dict[str, str] = project.get("entry-points", {}).get(group, {})
    return declared
