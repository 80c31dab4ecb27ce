"""`tools.count_path`: sums add up, functions are found by their first lines, and the recorder sees threads, generated
code and calls below an entry while its switch is on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

from tools.count_path import PACKAGE, STEP, functions, package, reach, total

ROOT = Path(__file__).parents[2]
SUBJECT = """\
import threading
from dataclasses import dataclass
from functools import lru_cache

@dataclass
class Point:
    x: int

@lru_cache
def inner():
    return Point(1)

def entry():
    inner()

def aside(): pass

def work():
    entry()
    thread = threading.Thread(target=aside)
    thread.start()
    thread.join()
"""
RECORDED = """
import sys
from pathlib import Path
from tools.path_recorder import record, shared
folder = Path(sys.argv[1])
switch = shared(folder / "switch", 1)
record(folder, str(folder), ["entry"])
import subject
subject.aside()
switch[0] = 2
subject.work()
switch[0] = 0
subject.inner.__wrapped__()
"""


# Where each begins, and whether it runs below the entry.
BELOW = {"def work():": 0, "def entry():": 1, "@lru_cache": 1, "def aside(): pass": 0}


def test_a_recorder_sees_what_runs_while_the_switch_is_on(tmp_path: Path) -> None:
    subject = tmp_path / "subject.py"
    subject.write_text(SUBJECT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    subprocess.run([sys.executable, "-c", RECORDED, str(tmp_path)], check=True, timeout=60, env=environment)
    (notes,) = tmp_path.glob("*.notes")
    lines = notes.read_bytes().rstrip(b"\0").decode().splitlines()
    source = SUBJECT.split("\n")
    written = {f"2\t{below}\t{subject}\t{source.index(line) + 1}" for line, below in BELOW.items()}
    assert written <= set(lines)
    (generated,) = set(lines) - written
    assert generated.startswith(f"2\t1\t{subject}\t")


@pytest.mark.slow
def test_the_folders_add_up_to_the_package() -> None:
    folders = package()
    everything = folders.pop("all")
    for key in ("files", "lines"):
        assert sum(folder[key] for folder in folders.values()) == everything[key]
    assert everything["files"] == len(list(PACKAGE.rglob("*.py")))
    assert everything["longest_function"] == max(folder["longest_function"] for folder in folders.values())


def test_a_function_counts_with_its_decorators_and_only_once() -> None:
    found = {name: (first, last) for name, first, last in functions("errors.py").values()}
    text = (PACKAGE / "errors.py").read_text(encoding="utf-8").split("\n")
    (name, (first, last)), *_ = found.items()
    assert any(f"def {name}(" in line for line in text[first - 1 : last])
    files = reach({("errors.py", first), ("errors.py", 0), ("clock.py", 0)})
    assert files["errors.py"]["ran"] == last - first + 1
    assert files["clock.py"]["ran"] == 0
    assert total(files)["lines"] == sum((PACKAGE / name).read_text().count("\n") for name in files)


def test_the_entries_of_a_step_exist() -> None:
    assert all(callable(resolve_name(entry)) for entry in STEP)


@pytest.mark.slow
def test_a_request_is_followed_through_all_its_processes() -> None:
    command = [sys.executable, "-m", "tools.count_path", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    request, step = document["request"], document["step"] | document["optional_parts_of_the_step"]
    folders = {name.split("/")[0] for name in request}
    assert {"server", "engine.py", "core", "scheduler", "cache", "worker", "models", "backend"} <= folders
    assert not folders & {"cli", "transfer"}
    for entry in STEP:
        assert entry.partition(":")[0].replace(".", "/").removeprefix("hydra_engine/") + ".py" in step
    assert set(step) < set(request)
    files = {entered.partition(":")[0] for entered in document["functions_of_plan_language"]}
    assert "scheduler/step.py" in files <= {name for part in document["reading_order"].values() for name in part}
    assert any("child" in name for name in request), "pictures are decoded in a process of their own"
