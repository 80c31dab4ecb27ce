"""Scripts that tests and tools hold in strings, for processes of their own: what they import from here is there.

Some run on a GPU alone, and no other tool looks into a string when something is renamed.
"""

from __future__ import annotations

import ast
import importlib
import textwrap
from collections.abc import Iterable, Iterator

import pytest

from tests.architecture.sources import PACKAGES, ROOT, files_in, nodes_of

FOLDERS = ("tests", "bench", "tools")
OURS = (*PACKAGES, "hydra_kernels", "bench", "tests", "tools")


def scripts(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, ast.Module]]:
    """Yields scripts with their lines; a number stands for each value in braces."""
    for node in nodes:
        text = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "0" for part in node.values)
        if "import " not in text:
            continue
        try:
            yield node.lineno, ast.parse(textwrap.dedent(text))
        except SyntaxError:  # no script, or one that is put together
            continue


def imported(script: ast.Module) -> set[tuple[str, str]]:
    """Modules of this repository that the script imports, each with an imported name, or "" for the module itself."""
    found: set[tuple[str, str]] = set()
    for node in ast.walk(script):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {(node.module, alias.name) for alias in node.names}
    return {(module, name) for module, name in found if module.partition(".")[0] in OURS}


def problem(module: str, name: str) -> str:
    """Empty where the module is there and has the name, as an attribute or as a module of its own."""
    try:
        there = importlib.import_module(module)
        if name and name != "*" and not hasattr(there, name):
            importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        return f"there is no {error.name}"
    return ""


@pytest.mark.slow
def test_what_scripts_in_strings_import_is_there() -> None:
    wanted: dict[tuple[str, str], str] = {}
    for path in files_in(*FOLDERS):
        for line, script in scripts(nodes_of(path)):
            for found in imported(script):
                wanted.setdefault(found, f"{path.relative_to(ROOT)}:{line}")
    assert ("hydra_engine.backend.cuda.device", "CudaDevice") in wanted, "the scripts for a GPU are looked at"
    wrong = [f"{place}: {said}" for found, place in wanted.items() if (said := problem(*found))]
    assert not wrong, "\n".join(wrong)


def test_a_stale_name_in_a_string_is_found() -> None:
    source = ast.parse("""SCRIPT = 'import json\\nfrom hydra_engine.backend.gone import CudaDevice'""")
    ((line, script),) = scripts(ast.walk(source))
    assert (line, imported(script)) == (1, {("hydra_engine.backend.gone", "CudaDevice")})
    assert problem("hydra_engine.backend.gone", "CudaDevice") == "there is no hydra_engine.backend.gone"
    assert problem("hydra_engine.errors", "Gone") and not problem("hydra_engine.core", "plans")
