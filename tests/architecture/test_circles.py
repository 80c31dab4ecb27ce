"""Files of the packages import each other in no circle: also for types alone, and inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from tests.architecture.sources import PACKAGES, ROOT, files_in, nodes_of, text_of
from tools.import_graph import BEGIN, END, diagram, reduced


def modules() -> dict[str, str]:
    """Files below the root by the names under which they are imported."""
    found = {}
    for path in files_in(*PACKAGES):
        name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        found[name] = path.relative_to(ROOT).as_posix()
    return found


def imports(nodes: tuple[ast.AST, ...], names: Mapping[str, str]) -> Iterator[str]:
    """Yields the files that a file imports. The package's own `__init__.py` does not count: its names are resolved
    late."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (names[alias.name] for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module in names:
            for alias in node.names:
                file = names.get(f"{node.module}.{alias.name}", names[node.module])
                if file != "hydra_engine/__init__.py":
                    yield file


def circles(graph: Mapping[str, set[str]]) -> list[frozenset[str]]:
    """Strongly connected components of more than one file."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for other in graph[waiting.pop()] - seen:
                seen.add(other)
                waiting.append(other)
        return seen

    reached = {file: reach(file) for file in graph}
    inside = {file: frozenset(other for other in reached[file] if file in reached[other]) for file in graph}
    return sorted({circle for circle in inside.values() if len(circle) > 1}, key=sorted)


def test_no_files_import_each_other_in_a_circle() -> None:
    names = modules()
    graph = {file: set(imports(nodes_of(ROOT / file), names)) - {file} for file in names.values()}
    found = circles(graph)
    assert not found, "\n".join(" <-> ".join(sorted(circle)) for circle in found)


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set[str](), "e": {"a"}}
    assert circles(graph) == [frozenset("abc")]


def test_the_page_draws_the_imports_between_folders() -> None:
    drawn = text_of(ROOT / "docs" / "architecture.md").partition(BEGIN)[2].partition(END)[0]
    assert drawn == diagram(), "run python -m tools.import_graph --write"


def test_an_arrow_that_others_imply_is_not_drawn() -> None:
    assert reduced({"a": {"b", "c", "d"}, "b": {"c"}}) == {"a": {"b", "d"}, "b": {"c"}}
