"""Runs the code cells of a notebook and stores what they show, as Jupyter would, without Jupyter:

    python -m tools.run_notebook [NOTEBOOK]

NOTEBOOK is examples/timelines.ipynb unless given. Knows what that notebook needs: one namespace, `await`, and the
value of a cell's last line as text and HTML.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import pprint
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples" / "timelines.ipynb"


async def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Runs a cell in the namespace `names`. Returns the value of its last line, None if that is no expression."""
    tree = ast.parse(source)
    if isinstance(tree.body[-1], ast.Expr):
        tree.body[-1] = ast.copy_location(
            ast.Assign([ast.Name("_", ast.Store())], tree.body[-1].value, lineno=1, col_offset=0), tree.body[-1]
        )
    names["_"] = None
    code = compile(ast.fix_missing_locations(tree), "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    done = eval(code, names)
    if inspect.isawaitable(done):
        await done
    return names["_"]


def shown(value: Any, number: int) -> list[dict[str, Any]]:
    """The outputs of a cell that ended with `value`, in the notebook format."""
    if value is None:
        return []
    data = {"text/plain": pprint.pformat(value, width=79).splitlines(keepends=True)}
    if hasattr(value, "_repr_html_"):
        data["text/html"] = value._repr_html_().splitlines(keepends=True)
    return [{"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data}]


async def run_cells(cells: Iterable[dict[str, Any]]) -> None:
    names: dict[str, Any] = {}
    for number, cell in enumerate((cell for cell in cells if cell["cell_type"] == "code"), 1):
        cell["execution_count"] = number
        cell["outputs"] = shown(await run_cell("".join(cell["source"]), names), number)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else NOTEBOOK
    notebook = json.loads(path.read_text(encoding="utf-8"))
    asyncio.run(run_cells(notebook["cells"]))
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
