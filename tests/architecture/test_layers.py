"""The shape of the house: imports point to earlier rooms only, deciding rooms stay free of torch, nothing prints.

Rooms and their order are the table of docs/architecture.md. Size limits are warnings, shown with `pytest -rA`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hydra_engine"

# Each room may import itself and rooms before it in this list, as far as `ALLOWED` agrees.
BASE = {"errors", "clock", "log"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "clock": set(),
    "log": set(),
    "core": BASE,
    "config": BASE | {"core"},
    "specs": BASE | {"core"},
    "guidance": BASE | {"core"},
    "cache": BASE | {"core"},
    "observe": BASE | {"core"},
    "scheduler": BASE | {"core", "config", "cache"},
    "transfer": BASE | {"core"},
    "backend": BASE | {"core"},
    "models": BASE | {"core", "config", "specs", "backend"},
    "worker": BASE | {"core", "config", "specs", "guidance", "backend", "models"},
    "intake": BASE | {"core", "config", "specs", "guidance"},
    "planner": BASE | {"core", "config", "specs"},
    "instance": BASE
    | {
        "core",
        "config",
        "specs",
        "cache",
        "observe",
        "scheduler",
        "transfer",
        "backend",
        "models",
        "worker",
        "planner",
    },
    "cluster": BASE | {"core", "config", "observe", "transfer", "instance"},
    "front": BASE | {"core", "config", "specs", "observe", "intake", "cluster"},
    "engine": BASE | {"core", "config", "specs", "observe", "intake", "front"},
    "server": BASE | {"core", "config", "observe", "cluster", "engine"},
    "demo": {"specs"},
    "cli": BASE | {"core", "config", "observe", "engine", "server", "planner", "instance", "backend", "demo"},
    "__main__": BASE | {"cli", ""},
    "": BASE | {"core", "config", "engine"},
}
# Rooms that must run without torch. Only these files of other rooms may assemble what computes.
TORCH_FREE = {
    *(
        "errors",
        "clock",
        "log",
        "core",
        "config",
        "specs",
        "guidance",
        "cache",
        "observe",
        "scheduler",
        "intake",
        "cluster",
    ),
    *("front", "engine", "server", "cli", "planner", "transfer"),
}
TORCH_FREE_FILES = {"instance/instance.py", "instance/ports.py", "instance/migration.py"}
# Besides the backend, only this file calls the extension: for pictures, which are no devices' business.
PICTURES_IN_C = "intake/resize.py"
# What a topology names is compared with what the driver shows: this file may ask, by a file of the backend that is free
# of torch until an instance chooses.
ASKS_FOR_DEVICES = ("front/placement.py", "hydra_engine.backend")
# Of the server only these know that there are processes; the others see an engine.
SERVER_PROCESSES = {"relay_wire.py", "relay_link.py", "relay.py", "front_worker.py", "front_workers.py"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} uses a relative import"
            module = node.module or ""
            # `from hydra_engine import log` imports the module hydra_engine.log
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "hydra_engine" else [module]
            found += [(name, node.lineno) for name in names]
    return found


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_point_to_earlier_rooms(path: Path) -> None:
    room = room_of(path)
    assert room in ALLOWED, f"{room} is a new room: add it to the table here and in docs/architecture.md"
    for module, line in imports_of(path):
        if module.split(".")[0] != "hydra_engine":
            continue
        parts = module.split(".")
        target = parts[1] if len(parts) > 1 else ""
        if target == room or target == "__version__":
            continue
        if target == "_C" and (room == "backend" or name_of(path) == PICTURES_IN_C):
            continue
        if (name_of(path), module) == ASKS_FOR_DEVICES:
            continue
        assert target in ALLOWED[room], f"{name_of(path)}:{line} imports {module}: not allowed for room {room!r}"
        if (room, target) == ("server", "cluster"):
            assert path.name in SERVER_PROCESSES, f"{name_of(path)}:{line} imports {module}"


def test_the_import_order_has_no_cycle() -> None:
    edges = {room: set(allowed) - {room} for room, allowed in ALLOWED.items()}
    ordered: list[str] = []
    while edges:
        ready = [room for room, targets in edges.items() if targets <= set(ordered)]
        assert ready, f"cycle among {sorted(edges)}"
        ordered += ready
        for room in ready:
            del edges[room]


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_deciding_and_connecting_files_do_not_import_torch(path: Path) -> None:
    if room_of(path) not in TORCH_FREE and name_of(path) not in TORCH_FREE_FILES:
        return
    heavy = [f"{m} (line {line})" for m, line in imports_of(path) if m.split(".")[0] in ("torch", "triton")]
    assert not heavy, f"{name_of(path)} imports {heavy}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_only_the_backend_knows_devices(path: Path) -> None:
    if room_of(path) in ("backend", "demo"):
        return
    text = path.read_text(encoding="utf-8")
    extension = () if name_of(path) == PICTURES_IN_C else ("hydra_engine._C", "import _C\n")
    for word in ("torch.cuda", ".is_cuda", "import triton", *extension):
        assert word not in text, f"{name_of(path)} mentions {word}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_nothing_unpickles_or_evaluates(path: Path) -> None:
    banned_modules = {"pickle", "marshal", "shelve", "dill", "multiprocessing"}
    for module, line in imports_of(path):
        assert module.split(".")[0] not in banned_modules, f"{name_of(path)}:{line} imports {module}"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec"), f"{name_of(path)}:{node.lineno} calls {node.func.id}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            # The training script resumes from a file that it wrote itself; nothing that serves may.
            loads = (node.value.id, node.attr) == ("torch", "load") and room_of(path) != "demo"
            assert not loads, f"{name_of(path)}:{node.lineno} uses torch.load"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    if path.stat().st_size:
        assert ast.get_docstring(tree_of(path)), f"{name_of(path)} has no module docstring"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_sizes(path: Path) -> None:
    """Warnings, not failures: a long file or function is a question to the next reader."""
    lines = path.read_text(encoding="utf-8").count("\n")
    long = [f"{lines} lines"] if lines > MAX_FILE_LINES else []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                long.append(f"{node.name} has {length} lines")
    if long:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(f"{name_of(path)}: {', '.join(long)}", stacklevel=1)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_importing_the_front_loads_no_torch_and_no_model_code() -> None:
    done = run_python(
        "import sys, hydra_engine.engine, hydra_engine.server.runner, hydra_engine.cli.serve\n"
        "print([m for m in ('torch', 'triton', 'hydra_engine.models') if m in sys.modules])"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_importing_every_module_touches_no_gpu() -> None:
    names = [
        "hydra_engine." + name_of(p).removesuffix(".py").replace("/", ".").removesuffix(".__init__") for p in modules()
    ]
    skip = ("__main__", "hydra_engine.__init__")
    wanted = [n for n in names if not n.endswith(skip)]
    code = f"import importlib, torch\nfor n in {wanted!r}: importlib.import_module(n)\n"
    done = run_python(code + "assert not torch.cuda.is_initialized()")
    assert done.returncode == 0, done.stderr[-2000:]


def test_exported_names_exist() -> None:
    done = run_python("import hydra_engine as h\nfor n in h.__all__: getattr(h, n)")
    assert done.returncode == 0, done.stderr


def test_the_repository_has_no_import_named_like_a_known_package() -> None:
    """A folder `kernels` that imports as a package would shadow the library of that name."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
