"""Writes the API reference as HTML from docstrings and signatures: `make docs`, or

    python -m tools.api_reference [DIRECTORY]

DIRECTORY is build/docs unless given. Needs pdoc, which is in the group `dev`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pdoc

import hydra_engine

MODULES = (
    "hydra_engine",
    "hydra_engine.config",
    "hydra_engine.core.outputs",
    "hydra_engine.errors",
    "hydra_engine.backend.base",
    "hydra_engine.backend.device",
)


def write(directory: Path) -> None:
    """Writes index.html, a page per module and the search index. Raises RuntimeError if a module cannot be imported."""
    for name in hydra_engine.__all__:  # resolved on first use otherwise, which pdoc does not see
        setattr(hydra_engine, name, getattr(hydra_engine, name))
    # A package's name alone would document all that is in it.
    others = "|".join(name.removeprefix("hydra_engine.").replace(".", r"\.") for name in MODULES[1:])
    parents = {name.split(".")[1] for name in MODULES[1:]}
    kept = rf"(?:{others}|{'|'.join(sorted(parents))})$"
    pdoc.render.configure(docformat="markdown", footer_text=f"hydra-engine {hydra_engine.__version__}")
    pdoc.pdoc(*MODULES, rf"!hydra_engine\.(?!{kept})", output_directory=directory)


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "build/docs")
    write(directory)
    print(f"{directory / 'index.html'}")


if __name__ == "__main__":
    main()
