"""Writes the API reference as HTML from docstrings and signatures: `make docs`, or

    python -m tools.api_reference [DIRECTORY]

DIRECTORY is build/docs unless given. Needs pdoc, which is in the group `dev`.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pdoc

import hydra_engine
from hydra_engine import config

MODULES = (
    "hydra_engine",
    "hydra_engine.config",
    "hydra_engine.frontend.call",
    "hydra_engine.frontend.handle",
    "hydra_engine.core.outputs",
    "hydra_engine.core.request",
    "hydra_engine.errors",
    "hydra_engine.backend.base",
    "hydra_engine.backend.device",
)
GROUPS = ("EngineConfig", "SchedulerConfig", "CacheConfig", "MediaConfig", "ClusterConfig", "ServerConfig")


def write(directory: Path) -> None:
    """Writes index.html, a page per module and the search index. Raises RuntimeError if a module cannot be imported."""
    for name in hydra_engine.__all__:  # resolved on first use otherwise, which pdoc does not see
        setattr(hydra_engine, name, getattr(hydra_engine, name))
    for group in (getattr(config, name) for name in GROUPS):
        options = "\n".join(f"- {f.name}: {f.metadata['help']}" for f in fields(group) if f.metadata.get("help"))
        group.__doc__ = f"{group.__doc__}\n\n{options}"
    for module in map(import_module, MODULES):
        for kind in vars(module).values():
            if getattr(kind, "__module__", "") == module.__name__ and (is_dataclass(kind) or hasattr(kind, "_fields")):
                create = getattr(kind, "__init__" if is_dataclass(kind) else "__new__")
                create.__annotations__.update(get_type_hints(kind))  # pdoc cannot resolve these
    vars(import_module("hydra_engine.core.request"))["__all__"] = ["Slo"]  # the others are the engine's own
    # A package's name alone would document all that is in it.
    others = "|".join(name.removeprefix("hydra_engine.").replace(".", r"\.") for name in MODULES[1:])
    parents = {name.split(".")[1] for name in MODULES[1:]}
    kept = rf"(?:{others}|{'|'.join(sorted(parents))})$"
    pdoc.render.configure(docformat="markdown", footer_text=f"hydra-engine {hydra_engine.__version__}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Cannot determine where")  # keys that a TypedDict inherits
        pdoc.pdoc(*MODULES, rf"!hydra_engine\.(?!{kept})", output_directory=directory)


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "build/docs")
    write(directory)
    print(f"{directory / 'index.html'}")


if __name__ == "__main__":
    main()
