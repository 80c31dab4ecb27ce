"""Draws which folders of the package import which, as a Mermaid diagram: what another arrow implies is left out.

    python -m tools.import_graph [--write]

--write puts it into docs/architecture.md. Left out: the base, which are the package's own modules but
engine.py, and the packages beside it.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from graphlib import TopologicalSorter

from tools.scheduling_step import PACKAGE, PAGE

BEGIN, END = "<!-- python -m tools.import_graph --write -->\n", "<!-- end of imports -->"


def folder_of(parts: tuple[str, ...]) -> str | None:
    """The folder of a module named by its parts below the package; None for the base. Specs of families count as
    `models/specs`, since they have no torch."""
    if parts[:1] == ("models",) and (parts[1:2] == ("specs",) or parts[-1] == "spec" or parts[-1].endswith("_spec")):
        return "models/specs"
    first = parts[0] if parts else ""
    return first if ((PACKAGE / first / "__init__.py").exists() and first) or first == "engine" else None


def imports() -> dict[str, set[str]]:
    """The folders that each folder imports, at any time."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        importer = folder_of(path.relative_to(PACKAGE).with_suffix("").parts)
        if importer is None:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hydra_engine."):
                imported = folder_of(tuple(str(node.module).split(".")[1:]))
                if imported not in (None, importer):
                    found[importer].add(str(imported))
    return dict(found)


def reduced(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """The arrows that no path of several arrows implies. Raises CycleError if folders import each other in a circle."""
    reached: dict[str, set[str]] = {}
    for folder in TopologicalSorter(arrows).static_order():
        reached[folder] = set().union(*({other} | reached[other] for other in arrows.get(folder, ())))
    return {
        folder: {other for other in others if not any(other in reached[between] for between in others)}
        for folder, others in arrows.items()
    }


def diagram() -> str:
    arrows = sorted((folder, other) for folder, others in reduced(imports()).items() for other in others)
    lines = [
        f"  {folder.replace('/', '_')}[{folder}] --> {other.replace('/', '_')}[{other}]" for folder, other in arrows
    ]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```", ""])


def main() -> None:
    print(diagram())
    if "--write" in sys.argv:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}{diagram()}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
