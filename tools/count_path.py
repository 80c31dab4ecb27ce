"""Counts the lines that one picture request, one scheduling step and each folder of the package give a reader.

    python -m tools.count_path [--files] [--json]

A server of the demo model runs with a recorder in each of its processes. The first request warms it up; the second is
recorded, from the HTTP body to the last token of the stream. Counted are whole files in which a function ran, and the
lines of these functions. A file counts for a step if a function ran in it below one of `STEP`. Then the functions and
the reading order of a step in this process (tools/scheduling_step.py).

Not seen: C code (the extension, msgspec), constants and types that are only read (the file of a message type counts
where a function that ran names the type), branches that this request does not take. Left out: files in which only
functions ran that also run while the server is idle, such as heartbeats.
"""

from __future__ import annotations

import argparse
import ast
import base64
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from statistics import median
from typing import Any

from tools.path_recorder import shared
from tools.scheduling_step import PACKAGE, ROOT, mixed_step, print_step, reading_order

PICTURES = PACKAGE / "demo" / "pictures"
STEP = (
    "hydra_engine.scheduler.scheduler:StageScheduler.plan_vision",
    "hydra_engine.scheduler.scheduler:StageScheduler.plan_language",
)
OPTIONAL = ("scheduler/latency/", "scheduler/handover/")  # counted apart from the core
OFF, IDLE, REQUEST = range(3)  # of the switch
IDLE_S = 3.0
START_UP = "from pathlib import Path; from tools.path_recorder import record; record(Path({!r}), {!r}, {!r})\n"

Places = set[tuple[str, int]]  # a file below the package, and the line where a function begins


# ---- what there is


@cache
def functions(name: str) -> dict[int, tuple[str, int, int]]:
    """The functions of a file by their first line, decorators included: (name, first line, last line)."""
    files = {}
    for node in ast.walk(ast.parse((PACKAGE / name).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            files[first] = (node.name, first, node.end_lineno or first)
    return files


@cache
def num_lines(name: str) -> int:
    return (PACKAGE / name).read_text(encoding="utf-8").count("\n")


def folder_of(name: str) -> str:
    first, slash, _ = name.partition("/")
    return first if slash else "."


def by_folder(names: Iterable[str]) -> dict[str, list[str]]:
    folders = defaultdict(list)
    for name in sorted(names):
        folders[folder_of(name)].append(name)
    return dict(folders)


def package() -> dict[str, dict[str, Any]]:
    """Files, lines, median length of a file and longest function of each folder, and of all together ("all")."""
    names = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")]
    table = {}
    for folder, files in {**by_folder(names), "all": names}.items():
        lengths = [num_lines(name) for name in files]
        longest = max(
            ((last - first + 1, function) for name in files for function, first, last in functions(name).values()),
            default=(0, ""),
        )
        table[folder] = {
            "files": len(files),
            "lines": sum(lengths),
            "median": median(lengths),
            "longest_function": longest[0],
            "its_name": longest[1],
        }
    return table


# ---- what runs


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Runs a server of the demo model with a recorder in each of its processes; yields its URL."""
    entries = [resolve_name(entry).__qualname__ for entry in STEP]
    (folder / "sitecustomize.py").write_text(START_UP.format(str(folder), f"{PACKAGE}/", entries), encoding="utf-8")
    command = [sys.executable, "-m", "hydra_engine", "serve", "demo", "--port", "0", "--threads", "1"]
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    log = folder / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stderr=errors, cwd=ROOT, env=environment)
    try:
        while "ready on " not in (text := log.read_text(encoding="utf-8")):
            if process.poll() is not None:
                raise RuntimeError(f"the server has not started: {text}")
            time.sleep(0.1)
        yield text.partition("ready on ")[2].split()[0]
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


def ask(url: str, question: str, picture: str) -> int:
    """Asks a question about a picture; returns the number of events of the answer."""
    data = base64.b64encode((PICTURES / picture).read_bytes()).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "text", "text": question},
    ]
    body = {"model": "demo", "stream": True, "temperature": 0, "messages": [{"role": "user", "content": parts}]}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().count(b"data: ")


def trace() -> tuple[Places, Places]:
    """Returns the functions of the recorded request and those of its steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        switch = shared(folder / "switch", 1)
        with server(folder) as url:
            ask(url, "How many objects are there?", "shapes.png")
            time.sleep(1)
            switch[0] = IDLE
            time.sleep(IDLE_S)
            switch[0] = REQUEST
            assert ask(url, "Describe the picture.", "stars.png") > 10
            switch[0] = OFF
        notes: dict[tuple[int, bool], Places] = defaultdict(set)
        for path in folder.glob("*.notes"):
            for line in path.read_bytes().rstrip(b"\0").decode().splitlines():
                phase, is_step, file, number = line.split("\t")
                notes[int(phase), is_step == "1"].add((str(Path(file).relative_to(PACKAGE)), int(number)))
    request, idle = (notes[phase, False] | notes[phase, True] for phase in (REQUEST, IDLE))
    step = notes[REQUEST, True]
    own = {name for name, _ in (request - idle) | step}
    return {place for place in request if place[0] in own}, step


def reach(places: Places) -> dict[str, dict[str, int]]:
    """Lines of each file that was reached ("lines") and of the functions that ran in it ("ran")."""
    table = {}
    for name in sorted({name for name, _ in places}):
        ran = [functions(name)[line] for file, line in places if file == name and line in functions(name)]
        lines = {line for _, first, last in ran for line in range(first, last + 1)}
        table[name] = {"lines": num_lines(name), "ran": len(lines)}
    return table


def total(files: dict[str, dict[str, int]]) -> dict[str, int]:
    return {"files": len(files), **{key: sum(file[key] for file in files.values()) for key in ("lines", "ran")}}


# ---- the tables


def print_reach(title: str, files: dict[str, dict[str, int]], *, each: bool) -> None:
    print(f"\n{title:<36} files  lines    ran")
    for folder, names in by_folder(files).items():
        print("  {:<34} {files:5d} {lines:6d} {ran:6d}".format(folder, **total({name: files[name] for name in names})))
        for name in names if each else ():
            print("    {:<38} {lines:6d} {ran:6d}".format(name, **files[name]))
    print("  {:<34} {files:5d} {lines:6d} {ran:6d}".format("all", **total(files)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="everything, as one document")
    parser.add_argument("--files", action="store_true", help="name each file")
    arguments = parser.parse_args()
    request, step = map(reach, trace())
    optional = {name: step.pop(name) for name in list(step) if name.startswith(OPTIONAL)}
    folders = package()
    if arguments.json:
        document = {"request": request, "step": step, "optional_parts_of_the_step": optional}
        totals = {name: total(files) for name, files in document.items()}
        planned, _ = mixed_step()
        entered = {f"{file}:{function}": calls for (file, function), calls in planned.functions.items()}
        of_step = {"functions_of_plan_language": entered, "reading_order": reading_order()}
        print(json.dumps({"totals": totals, **document, **of_step, "package": folders}, indent=1))
        return
    print_reach("one picture request", request, each=arguments.files)
    print_reach("one scheduling step", step, each=arguments.files)
    if optional:
        print_reach("its optional parts", optional, each=arguments.files)
    print()
    print_step(functions=arguments.files)
    print(f"\n{'the package':<36} files  lines median  longest function")
    for folder, row in folders.items():
        print("  {:<34} {files:5d} {lines:6d} {median:6g} {longest_function:4d}  {its_name}".format(folder, **row))


if __name__ == "__main__":
    main()
