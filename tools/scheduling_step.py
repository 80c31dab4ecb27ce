"""Runs one mixed scheduling step in this process: the functions that it enters, and a reading order of its files.

    python -m tools.scheduling_step [--functions] [--write]

A scheduler of a single instance (tests/scheduler/stepper.py) plans it with a budget of 16 tokens: two decodes, the last
chunk of a prompt and the start of another one. `--functions` lists what `plan_language` enters, `--write` puts the
order into docs/architecture.md. The reading order also has what a start with cached blocks enters, a vision step, and
the results of both: the types that travel, the scheduler, then each file after those that it imports.

Calls into C (msgspec, numpy) are not seen. The file of a message type counts where a function that ran names the type.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

from tools.path_recorder import struct_files

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hydra_engine"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- python -m tools.scheduling_step --write -->", "<!-- end -->"
FIRST = ("core/ids.py", "scheduler/scheduler.py")  # of the types, whose names are used and not called; of the steps
RESULTS = "core/results.py"  # of the lanes: a step reads their fields and calls nothing in them
OPTIONAL = ("scheduler/latency/", "scheduler/handover/")
# What is said of other instances. The core knows that it may run some stages only (`stages`, `Role`) and that a
# connector may bring what it does not compute (`external_...`), but not from where, nor how.
OTHER_INSTANCES = re.compile(
    r"hand_?over|handing_over|remote|\bpull(s|ed)?\b|borrow|steal|\bpeers?\b|other instance|elsewhere", re.IGNORECASE
)


@dataclass
class Trace:
    """Functions of the package that ran, and their files."""

    functions: Counter[tuple[str, str]] = field(default_factory=Counter)  # calls by (file, qualified name)
    files: list[str] = field(default_factory=list)  # below the package, in the order of their first function
    switches: int = 0  # calls and returns that lead to another file

    @property
    def calls(self) -> int:
        return self.functions.total()

    @property
    def lines(self) -> int:
        """The lines of all its files, whole."""
        return sum(num_lines(file) for file in self.files)


@cache
def num_lines(file: str) -> int:
    return (PACKAGE / file).read_text(encoding="utf-8").count("\n")


def trace(call: Callable[[], object]) -> Trace:
    """Runs `call` under `sys.setprofile`. Comprehensions and lambdas count for the files, not as functions."""
    found, last = Trace(), ""

    def file_of(frame: FrameType | None) -> str:
        path = frame.f_globals.get("__file__", "") if frame else ""
        return Path(path).relative_to(PACKAGE).as_posix() if path.startswith(f"{PACKAGE}/") else ""

    def look(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal last
        if event not in ("call", "return"):
            return
        now = file_of(frame if event == "call" else frame.f_back)
        if now and now != last:
            found.switches += bool(last)
            last = now
        if event == "return" or not now:
            return
        structs = sorted(Path(path).relative_to(PACKAGE).as_posix() for path in struct_files(frame))
        found.files += [file for file in dict.fromkeys([now, *structs]) if file not in found.files]
        name = frame.f_code.co_qualname
        if frame.f_code.co_filename.startswith(f"{PACKAGE}/") and "<" not in name.rpartition(".")[2]:
            found.functions[now, name] += 1

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def mixed_step() -> tuple[Trace, Trace]:
    """`plan_language` of two decodes, a chunk of 6 tokens and a start of 3, text only; and what `on_language` enters.

    The stepper is imported here, since it belongs to the tests.
    """
    from tests.scheduler.stepper import Stepper

    stepper = Stepper(token_budget=16)
    for number in (1, 2):
        stepper.add(number, 4, max_new=50)
    for _ in range(3):
        stepper.language(took_s=0.01)
    stepper.add(3, 20, max_new=5)
    stepper.language(took_s=0.01)
    stepper.add(4, 3, max_new=5)
    plans: list[Any] = []
    planned = trace(lambda: plans.append(stepper.scheduler.plan_language(stepper.now)))
    chunks = [len(chunk.token_ids) for chunk in plans[0].chunks]
    assert (len(plans[0].decodes), chunks) == (2, [6, 3]), "not the step that is described above"
    result = stepper.lanes.compute(plans[0], stepper.now, stepper.now + 0.01, lambda _row: False)
    return planned, trace(lambda: stepper.scheduler.on_language(result, stepper.now + 0.01))


def cached_start() -> Trace:
    """`plan_language` of a prompt of three blocks, of which two are in the cache."""
    from tests.scheduler.stepper import Stepper

    stepper = Stepper()
    stepper.run(1, 12)
    stepper.add(2, 12, source=0, max_new=2)
    plans: list[Any] = []
    planned = trace(lambda: plans.append(stepper.scheduler.plan_language(stepper.now)))
    assert [len(chunk.token_ids) for chunk in plans[0].chunks] == [4], "not the start that is described above"
    return planned


def vision_step() -> tuple[Trace, Trace]:
    """`plan_vision` of one picture; and what `on_vision` of its result enters."""
    from hydra_engine.core.results import VisionResult
    from tests.scheduler.sim import Img
    from tests.scheduler.stepper import Stepper

    stepper = Stepper()
    stepper.add(1, 2, Img(4), 2)
    plans: list[Any] = []
    planned = trace(lambda: plans.append(stepper.scheduler.plan_vision(stepper.now)))
    result = VisionResult(plans[0].step_id, stepper.now, stepper.now + 0.01, (None,))
    return planned, trace(lambda: stepper.scheduler.on_vision(result, stepper.now + 0.01))


def reading_order() -> dict[str, list[str]]:
    """The files of a mixed step, a vision step and their results by part of the step, each file once. The last part has
    those of optional parts."""
    planned, ended = mixed_step()
    vision, encoded = vision_step()
    parts = {
        "a language step is planned": [*FIRST, *planned.files, *cached_start().files],
        "a vision step adds": vision.files,
        "their results add": [RESULTS, *ended.files, *encoded.files],
    }
    order: dict[str, list[str]] = {"types": [], **{part: [] for part in parts}, "optional": []}
    for part, files in parts.items():
        for file in _after_their_imports(files):
            if not any(file in found for found in order.values()):
                types, optional = file.startswith("core/"), file.startswith(OPTIONAL)
                in_types = types and part != "their results add"
                order["optional" if optional else "types" if in_types else part].append(file)
    return order


def _after_their_imports(files: Sequence[str]) -> list[str]:
    """Sorts files so that each stands after those that it imports; FIRST begin, other ties keep the given order."""
    order: list[str] = []

    def add(file: str) -> None:
        if file in order:
            return
        if file not in FIRST:
            for other in files:
                if other != file and other in imports_of(file):
                    add(other)
        order.append(file)

    for file in files:
        add(file)
    return order


@cache
def imports_of(file: str) -> frozenset[str]:
    """Files of the package that a file imports, those for types alone included."""
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    names = [name for node in imports for name in (node.module, *(f"{node.module}.{one.name}" for one in node.names))]
    return frozenset(f"{name.removeprefix('hydra_engine.').replace('.', '/')}.py" for name in names if name)


def name_other_instances() -> list[str]:
    """Files of the deciding core (state, plans, cache, scheduler without its folders) that mention other instances."""
    files = [PACKAGE / "core" / name for name in ("request.py", "state.py", "plans.py")]
    files += sorted([*PACKAGE.glob("cache/*.py"), *PACKAGE.glob("scheduler/*.py")])
    return [
        path.relative_to(PACKAGE).as_posix()
        for path in files
        if path.exists() and OTHER_INSTANCES.search(path.read_text(encoding="utf-8"))
    ]


def order_on_page() -> str:
    """The reading order as the lines between BEGIN and END of docs/architecture.md."""
    order = reading_order()
    lines = ["", "| part | files | lines |", "| --- | --- | --- |"]
    for part, files in order.items():
        lines.append(f"| {part} | {', '.join(f'`{file}`' for file in files)} | {sum(map(num_lines, files)):,} |")
    files = list(chain(*order.values()))
    lines.append(f"| all | {len(files)} files | {sum(map(num_lines, files)):,} |")
    return "\n".join(lines) + "\n"


def print_step(*, functions: bool = False) -> None:
    planned, ended = mixed_step()
    print("one mixed scheduling step            functions  files  lines  calls  switches of file")
    for name, step in (("plan_language", planned), ("on_language", ended)):
        row = f"{len(step.functions):9d} {len(step.files):6d} {step.lines:6d} {step.calls:6d} {step.switches:9d}"
        print(f"  {name:<34} {row}")
    for (file, function), calls in planned.functions.items() if functions else ():
        print(f"    {file}:{function} {calls}")
    order = reading_order()
    all_files = list(chain(*order.values()))
    print(f"\n{'its files in reading order':<36} {len(all_files):5d} {sum(map(num_lines, all_files)):6d}")
    for part, files in order.items():
        print(f"  {part + ':':<40} {sum(map(num_lines, files)):6d}")
        for file in files:
            print(f"    {file:<38} {num_lines(file):6d}")
    print(f"\nof the core, mention other instances: {' '.join(name_other_instances()) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", action="store_true", help="name each function that plan_language enters")
    parser.add_argument("--write", action="store_true", help="put the reading order into docs/architecture.md")
    arguments = parser.parse_args()
    print_step(functions=arguments.functions)
    if arguments.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}{order_on_page()}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
