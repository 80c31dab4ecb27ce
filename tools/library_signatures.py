"""The signatures of a library's calls as JSON, read out of its wheel without importing it.

    python -m tools.library_signatures flashinfer_python-0.7.2.post1-py3-none-any.whl flashinfer \\
        BatchDecodeWithPagedKVCacheWrapper.plan fast_decode_plan > tests/ops/flashinfer_signatures.json

Names are those that the package exports at its top, and methods of such classes. A method that hands its **kwargs to
`_<its name>_impl` has that method's parameters. Knows Python's syntax, nothing of the library.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Mapping, Sequence
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile


def facts_of(wheel: Path, package: str, names: Sequence[str]) -> dict[str, object]:
    """Raises LookupError for a name that the package does not have."""
    with ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        about = message_from_bytes(archive.read(metadata))
        sources = {name: archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")}
    calls = {name: _signature(sources, package, name) for name in names}
    return {"package": about["Name"], "version": about["Version"], "calls": calls}


def _signature(sources: Mapping[str, str], package: str, name: str) -> str:
    """Parameters as a definition has them, without annotations. Raises LookupError."""
    outer, _, method = name.partition(".")
    for node in ast.walk(ast.parse(sources[f"{package}/__init__.py"])):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            for alias in node.names:
                if outer == (alias.asname or alias.name):
                    body = ast.parse(sources[f"{package}/{node.module.replace('.', '/')}.py"]).body
                    defined = _defined(body, alias.name)
                    return _text(_function([defined]) if not method else _method(defined, method))
    raise LookupError(f"{package} exports no {outer}")


def _defined(body: Sequence[ast.stmt], name: str) -> ast.stmt:
    """The last definition of that name: those before it are overloads."""
    return [node for node in body if getattr(node, "name", None) == name][-1]


def _function(body: Sequence[ast.stmt]) -> ast.arguments:
    (node,) = body
    assert isinstance(node, ast.FunctionDef)
    return node.args


def _method(node: ast.stmt, name: str) -> ast.arguments:
    assert isinstance(node, ast.ClassDef)
    given = _function([_defined(node.body, name)])
    if given.kwarg is not None and any(getattr(part, "name", None) == f"_{name}_impl" for part in node.body):
        behind = _function([_defined(node.body, f"_{name}_impl")])
        known = {argument.arg for argument in (*given.args, *given.kwonlyargs)}
        defaults = [None] * (len(behind.args) - len(behind.defaults)) + behind.defaults + behind.kw_defaults
        for argument, default in zip((*behind.args, *behind.kwonlyargs), defaults, strict=True):
            if argument.arg not in known:
                given.kwonlyargs.append(argument)
                given.kw_defaults.append(default)
        given.kwarg = None
    return given


def _text(given: ast.arguments) -> str:
    for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if argument is not None:
            argument.annotation = None
    return f"({ast.unparse(given)})"


def main() -> None:
    wheel, package, *names = sys.argv[1:]
    print(json.dumps(facts_of(Path(wheel), package, names), indent=1))


if __name__ == "__main__":
    main()
