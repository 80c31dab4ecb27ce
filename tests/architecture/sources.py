"""The sources of the repository for the tests of this folder: each file is read and parsed once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(sorted(path.parent.name for path in ROOT.glob("hydra_*/__init__.py")))
SHIPPED = (*PACKAGES, "kernels", "tools")  # packages, and tools that follow their rules


@cache
def files_in(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> tuple[Path, ...]:
    """Files of these folders and suffixes, sorted; folders that do not exist are skipped."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    return tuple(sorted(path for path in found if path.is_file() and "vendor" not in path.parts))


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Nodes of the file, the module first."""
    return tuple(ast.walk(tree_of(path)))


def docstrings_of(path: Path) -> Iterator[tuple[int, str]]:
    """The line of each definition that has a docstring, 1 for the module, and the docstring."""
    for node in nodes_of(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text
