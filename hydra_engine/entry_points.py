"""Entry points: what other packages add to the engine, which does not know their names."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

_PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def load_entry_points(group: str) -> dict[str, Any]:
    """The objects in a group by name, imported."""
    return {name: resolve_name(value) for name, value in find_entry_points(group).items()}


def load_entry_point(group: str, name: str) -> Any | None:
    """Returns the object of a group that has this name; imports no other. None if there is none."""
    value = find_entry_points(group).get(name)
    return None if value is None else resolve_name(value)


def find_entry_points(group: str) -> dict[str, str]:
    """Returns "module:attribute" of the objects in a group by name.

    In a source tree, installed or not, they are those that its pyproject.toml declares. Elsewhere they are those of all
    installed distributions.
    """
    declared = _declared_here(group)
    if declared is not None:
        return declared
    from importlib.metadata import entry_points  # takes a third of the time of `hydra-engine --help`

    return {point.name: point.value for point in entry_points(group=group)}


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
