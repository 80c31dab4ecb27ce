"""Layers: imports point to earlier folders only, deciding folders stay free of torch.

Each test reads all files and reports everything that is wrong, since there are several hundred of them.
Folders and their order are the table of docs/architecture.md.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGES, ROOT, files_in, nodes_of, text_of, tree_of

PACKAGE = ROOT / "hydra_engine"
BESIDE = tuple(name for name in PACKAGES if name != PACKAGE.name)  # they use the engine, which does not import them

# Each folder (or module beside them) may import itself and what is listed here, which only holds names above it.
BASE = {"errors", "clock", "log"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "clock": set(),
    "log": set(),
    "entry_points": set(),
    "notebook": set(),
    "profile_file": set(),
    "core": BASE | {"notebook"},
    "config": BASE | {"core", "entry_points"},
    "specs": BASE | {"core", "entry_points"},
    "guidance": BASE | {"core"},
    "cache": BASE | {"core"},
    "telemetry": BASE | {"core"},
    "transfer": BASE | {"core"},
    "scheduler": BASE | {"core", "config", "cache", "transfer"},
    "backend": BASE | {"core", "profile_file"},
    "models": BASE | {"core", "config", "specs", "backend"},
    "worker": BASE | {"core", "config", "specs", "guidance", "transfer", "backend", "models"},
    "preprocess": BASE | {"core", "config", "specs", "guidance"},
    "profiler": BASE | {"core", "config", "specs", "profile_file"},
    "instance": BASE
    | {
        "core",
        "config",
        "specs",
        "cache",
        "telemetry",
        "scheduler",
        "transfer",
        "backend",
        "models",
        "worker",
        "profiler",
    },
    "cluster": BASE | {"core", "config", "telemetry", "transfer", "instance", "entry_points"},
    "frontend": BASE | {"core", "config", "specs", "telemetry", "preprocess", "cluster"},
    "engine": BASE | {"core", "config", "specs", "telemetry", "preprocess", "cluster", "frontend"},
    "server": BASE | {"core", "config", "telemetry", "engine", "entry_points"},
    "demo": set(),
    "cli": BASE
    | {
        "core",
        "config",
        "specs",
        "guidance",
        "telemetry",
        "models",
        "preprocess",
        "cluster",
        "engine",
        "server",
        "profiler",
        "instance",
        "backend",
        "entry_points",
    },
    "hydra_nodes": BASE | {"core", "config", "transfer", "worker", "instance", "cluster", "preprocess"},
    "hydra_planner": BASE
    | {
        "core",
        "config",
        "specs",
        "cache",
        "telemetry",
        "scheduler",
        "transfer",
        "profiler",
        "worker",
        "instance",
        "frontend",
        "preprocess",
        "backend",
        "engine",
        "cli",
    },
    "hydra_terminal": BASE | {"hydra_planner", "core", "config", "specs", "preprocess", "engine", "server", "cli"},
    "hydra_quantizer": BASE | {"core", "config", "specs", "backend", "models", "cli"},
    "hydra_transformers": BASE | {"core", "specs", "backend", "models"},
    "__main__": BASE | {"cli", "config", ""},
    "": BASE | {"core", "config", "telemetry", "frontend", "engine"},
}
# Folders that must run without torch, and files of other folders that must.
TORCH_FREE = {
    *(
        "errors",
        "clock",
        "log",
        "entry_points",
        "notebook",
        "profile_file",
        "core",
        "config",
        "specs",
        "guidance",
        "cache",
        "telemetry",
        "scheduler",
        "preprocess",
        "cluster",
    ),
    *("frontend", "engine", "server", "cli", "profiler", "hydra_planner", "hydra_terminal", "transfer"),
}
TORCH_FREE_FILES = {
    *("instance/instance.py", "instance/ports.py", "instance/migration.py"),
    *("hydra_transformers/__init__.py", "hydra_transformers/build_spec.py", "hydra_transformers/spec.py"),
}
# Folders and files that only some deployments need: `HOOKS` attaches them.
OPTIONAL_PARTS = {
    *("scheduler/handover", "scheduler/latency"),
    *("worker/transfer.py", "worker/vision/gate.py", "instance/migration.py"),
}
# Copies between instances, which only the optional parts of these folders know.
TRANSFER = "hydra_engine.transfer"
ONE_INSTANCE = ("scheduler", "worker")
# Step times, which only latency limits need.
PROFILER = "hydra_engine.profiler"
HOOKS = "instance/hooks.py"
# The only file outside the backend that calls the extension, for pictures.
PICTURES_IN_C = "preprocess/media/images.py"
# Compares the devices that a topology names with those of the driver: may import this module of the backend, which does
# not import torch itself.
ASKS_FOR_DEVICES = ("frontend/routing/placement.py", "hydra_engine.backend")
# Folders of the repository that are not shipped.
OUTSIDE = {"tools", "bench", "tests", "examples"}
# Files that import each other in a circle, still.
CIRCLES: tuple[set[str], ...] = ()
MAX_FUNCTION_LINES = 60
MAX_FOLDER_FILES = 20


def modules() -> tuple[Path, ...]:
    return files_in(*PACKAGES)


def name_of(path: Path) -> str:
    """The path below hydra_engine; of the packages beside it, with their names."""
    return str(path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def folder_of(path: Path) -> str:
    return folder_named(Path(name_of(path)).with_suffix("").parts)


def folder_named(parts: Sequence[str]) -> str:
    """The first folder, or "specs" for the files of models that describe a family without torch."""
    if parts[0] == "models" and (parts[1:2] == ("specs",) or parts[-1] == "spec" or parts[-1].endswith("_spec")):
        return "specs"
    return "" if parts[0] == "__init__" else parts[0]


@cache
def imports_of(path: Path) -> list[tuple[str, int]]:
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} uses a relative import"
            module = node.module or ""
            # `from hydra_engine import log` imports the module hydra_engine.log
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "hydra_engine" else [module]
            found += [(name, node.lineno) for name in names]
    return found


def test_every_folder_is_in_the_table() -> None:
    folders = {folder_of(path) for path in modules()}
    assert folders <= ALLOWED.keys(), "a new folder: add it to the table here and in docs/architecture.md"


def forbidden_imports(path: Path) -> Iterator[str]:
    folder = folder_of(path)
    for module, line in imports_of(path):
        if module.split(".")[0] in OUTSIDE:
            yield f"{name_of(path)}:{line} imports {module}: no part of the package"
        if module.split(".")[0] not in PACKAGES:
            continue
        target = folder_named(tuple(module.removeprefix("hydra_engine.").split(".")))
        target = "" if target == "hydra_engine" else target
        if target == folder or target == "__version__":
            continue
        if target == "_C" and (folder == "backend" or name_of(path) == PICTURES_IN_C):
            continue
        if (name_of(path), module) == ASKS_FOR_DEVICES:
            continue
        if target not in ALLOWED[folder]:
            yield f"{name_of(path)}:{line} imports {module}: not allowed for folder {folder!r}"


def in_all_modules(look: Callable[[Path], Iterator[str]]) -> list[str]:
    return [problem for path in modules() for problem in look(path)]


def test_imports_point_to_earlier_folders() -> None:
    assert in_all_modules(forbidden_imports) == []


def test_the_core_of_a_folder_imports_no_optional_part() -> None:
    def optional_parts(path: Path) -> Iterator[str]:
        for part in OPTIONAL_PARTS:
            module = "hydra_engine." + part.removesuffix(".py").replace("/", ".")
            in_core = folder_of(path) == part.split("/")[0] and not path.is_relative_to(PACKAGE / part)
            for imported, line in imports_of(path) if in_core and name_of(path) != HOOKS else ():
                if f"{imported}.".startswith(f"{module}."):
                    yield f"{name_of(path)}:{line} imports {imported}: the core knows no optional part"

    def other_instances(path: Path) -> Iterator[str]:
        in_core = not any(path.is_relative_to(PACKAGE / part) for part in OPTIONAL_PARTS)
        for imported, line in imports_of(path) if folder_of(path) in ONE_INSTANCE and in_core else ():
            if f"{imported}.".startswith(f"{TRANSFER}."):
                yield f"{name_of(path)}:{line} imports {imported}: the core knows one instance"

    def step_times(path: Path) -> Iterator[str]:
        for imported, line in imports_of(path) if folder_of(path) == "instance" and name_of(path) != HOOKS else ():
            if imported.startswith(PROFILER):
                yield f"{name_of(path)}:{line} imports {imported}: an instance without latency limits has no step times"

    assert all((PACKAGE / part).exists() for part in OPTIONAL_PARTS)
    assert in_all_modules(step_times) == []
    assert in_all_modules(other_instances) == []
    assert in_all_modules(optional_parts) == []


def test_the_import_order_has_no_cycle() -> None:
    edges = {folder: set(allowed) - {folder} for folder, allowed in ALLOWED.items()}
    ordered: list[str] = []
    while edges:
        ready = [folder for folder, targets in edges.items() if targets <= set(ordered)]
        assert ready, f"cycle among {sorted(edges)}"
        ordered += ready
        for folder in ready:
            del edges[folder]


def circles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """The largest sets of names that reach each other (strongly connected components of two and more)."""
    order: dict[str, int] = {}  # in which names are met
    lowest: dict[str, int] = {}  # the earliest name that each reaches
    open_names: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        open_names.append(name)
        for target in edges[name]:
            if target not in order:
                visit(target)
            if target in open_names:
                lowest[name] = min(lowest[name], lowest[target])
        if lowest[name] == order[name]:
            first = open_names.index(name)
            found.append(set(open_names[first:]))
            del open_names[first:]

    for name in edges:
        if name not in order:
            visit(name)
    return [circle for circle in found if len(circle) > 1]


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports for types and within functions count. Not counted: the package's own `__init__`, which exports lazily."""
    files = {module_of(path): path for path in modules() if path != PACKAGE / "__init__.py"}
    edges: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                edges[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules_in = {f"{node.module}.{alias.name}" for alias in node.names}
                edges[name] |= {module if module in files else node.module or "" for module in modules_in}
        edges[name] = (edges[name] & files.keys()) - {name}
    new = [circle for circle in circles(edges) if not any(circle <= known for known in CIRCLES)]
    assert not new, f"files that import each other in a circle: {[sorted(circle) for circle in new]}"


def test_circles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": set(), "f": {"g"}, "g": {"f", "a"}}
    assert circles(edges) == [{"a", "b", "c"}, {"f", "g"}]


def test_deciding_and_connecting_files_do_not_import_torch() -> None:
    def heavy(path: Path) -> Iterator[str]:
        if folder_of(path) in TORCH_FREE or name_of(path) in TORCH_FREE_FILES:
            for module, line in imports_of(path):
                if module.split(".")[0] in ("torch", "triton"):
                    yield f"{name_of(path)}:{line} imports {module}"

    assert in_all_modules(heavy) == []


def test_only_the_backend_knows_devices() -> None:
    def devices(path: Path) -> Iterator[str]:
        if folder_of(path) == "backend":
            return
        extension = () if name_of(path) == PICTURES_IN_C else ("hydra_engine._C", "import _C\n")
        for word in ("torch.cuda", ".is_cuda", "import triton", *extension):
            if word in text_of(path):
                yield f"{name_of(path)} mentions {word}"

    assert in_all_modules(devices) == []


def test_one_module_imports_ray() -> None:
    """Only a cluster needs it, so that it is imported where it is used."""
    words = ("import ray", 'import_module("ray', "from ray")
    found = {name_of(path) for path in modules() if any(word in text_of(path) for word in words)}
    assert found == {"hydra_nodes/ray_launcher.py"}
    assert not [module for module, _ in imports_of(ROOT / "hydra_nodes/ray_launcher.py") if module.startswith("ray")]


BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "multiprocessing"}


def test_nothing_unpickles_or_evaluates() -> None:
    def dangers(path: Path) -> Iterator[str]:
        for module, line in imports_of(path):
            if module.split(".")[0] in BANNED_MODULES:
                yield f"{name_of(path)}:{line} imports {module}"
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                yield f"{name_of(path)}:{node.lineno} calls {node.func.id}"
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
                yield f"{name_of(path)}:{node.lineno} uses torch.load"

    assert in_all_modules(dangers) == []


def test_every_module_says_what_it_is_for() -> None:
    assert [name_of(path) for path in modules() if text_of(path) and not ast.get_docstring(tree_of(path))] == []


def test_functions_fit_on_a_page() -> None:
    """A file may be as long as its concept."""

    def too_long(path: Path) -> Iterator[str]:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    yield f"{name_of(path)}: {node.name} has {length} lines"

    assert in_all_modules(too_long) == []


def test_folders_can_be_taken_in_at_a_glance() -> None:
    folders = Counter(path.parent for path in modules() if path.name != "__init__.py")
    assert {str(folder): count for folder, count in folders.items() if count > MAX_FOLDER_FILES} == {}


IMPORTS = """
import gc, importlib, sys
gc.disable()  # there is nothing to collect in what is imported
import hydra_engine
print([name for name in sys.modules if name.startswith("hydra_engine.")])
import hydra_engine.engine, hydra_engine.server.runner, hydra_engine.cli.serve
heavy = ("torch", "triton", "ray", "hydra_nodes", "hydra_engine.models.vlm")
print([name for name in heavy if name in sys.modules])
for name in hydra_engine.__all__:
    getattr(hydra_engine, name)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(sys.modules["torch"].cuda.is_initialized())
gc.freeze()
"""


@pytest.mark.slow
def test_importing_the_frontend_loads_no_torch_and_importing_everything_touches_no_gpu() -> None:
    """Checks too that exported names exist."""
    wanted = [module_of(path) for path in modules() if path.name != "__main__.py"]
    command = [sys.executable, "-c", IMPORTS, *wanted]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    loaded_by_the_package, heavy_in_the_frontend, gpu_in_use = done.stdout.split("\n")[:3]
    assert loaded_by_the_package == "[]"
    assert heavy_in_the_frontend == "[]"
    assert gpu_in_use == "False"


# Tests that a change in the scheduler runs: two seconds from cold, of which torch would be most.
QUICK_TESTS = ("tests/scheduler", "tests/cache", "tests/core", "tests/transfer", "tests/telemetry")
COLLECT = """
import sys, pytest
assert not pytest.main(["-q", "--collect-only", *sys.argv[1:]])
print([name for name in ("torch", "transformers", "schemathesis") if name in sys.modules])
"""


@pytest.mark.slow
def test_tests_of_deciding_code_load_no_torch() -> None:
    command = [sys.executable, "-c", COLLECT, *QUICK_TESTS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_repository_has_no_import_named_like_a_known_package() -> None:
    """A folder `kernels` that imports as a package would shadow the library of that name."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
