"""gpu-check on a machine whose GPU is made up: `python -m tests.bench.gpu_stand_in NAMES [flags of gpu-check]`.

Everything is the real check's but the machine and the parts, which are those of the names here, with commas: what goes
wrong on a device goes wrong in them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from bench.gpu_check import commands
from bench.gpu_check.__main__ import main
from bench.gpu_check.archive import ARCHIVE
from bench.gpu_check.commands import Setup, Tests
from bench.gpu_check.decide import decisive
from bench.gpu_check.machine import Machine
from bench.micro.parts import Part

TESTS = """
import os, signal, sys, time, types
import pytest

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("number", range(10))
def test_half(number):
    assert number % 2 == 0, "odd ones fail"


def test_hang():
    time.sleep(600)


def test_crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def test_lost_device(monkeypatch):
    def synchronize():
        raise RuntimeError("an illegal memory access was encountered")

    sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(
        is_initialized=lambda: True, synchronize=synchronize))
    raise RuntimeError("launch failed")


@pytest.mark.parametrize("number", range(4))
def test_after(number):
    assert "torch" not in sys.modules


@pytest.mark.skip(reason="no second GPU")
def test_of_two():
    pass


@pytest.mark.alone
def test_alone():
    pass
"""

_DOCUMENT = {
    "bench": "decode",
    "suite": "micro",
    "mode": "quick",
    "complete": False,
    "rows": [{"what": "a row", "seconds": {"median": 0.001}}],
    "card": {"gpu": "a GPU", "commit": "abc"},
}
_WRITES = f"import json, sys; open(sys.argv[1], 'w').write(json.dumps({_DOCUMENT!r}))"


def script(name: str, code: str, *arguments: str, limit_s: float = 20.0, unless: str | None = None) -> Part:
    after = None if name == "build" else "build"
    command = (sys.executable, "-c", code, *arguments)
    return Part(name, command, limit_s, 0.1, after=after, planned_s=1.0, unless=unless)


def crashes(setup: Setup) -> Part:
    path = setup.folder / "decode.json"
    return script("llava", f"{_WRITES}; import os; os.kill(os.getpid(), 11)", str(path))


def tests(setup: Setup) -> Part:
    files = setup.folder / "test_stand_in.py"
    files.write_text(TESTS, encoding="utf-8")
    commands.TEST_S = 3
    return commands.run_tests(setup, Tests("tests-ops", [str(files)], "cuda and not alone", 2, 30.0, 60.0))


PARTS: dict[str, Callable[[Setup], Part]] = {
    "build": lambda setup: script("build", "print('compiled')"),
    "no-build": lambda setup: script("build", "raise SystemExit('CUDA is left out: no nvcc found')"),
    "tests": tests,
    "crashes": crashes,
    "again": lambda setup: script("llava-again", "print('nothing is left to run')", unless="llava"),
    "hangs": lambda setup: script("hangs", "import time; print('so far', flush=True); time.sleep(99)", limit_s=1.5),
    "serves": lambda setup: script(
        "serves", "import os, time; print(os.getpid(), flush=True); time.sleep(99)", limit_s=99.0
    ),
    "talks": lambda setup: script(
        "talks", "import os, sys; sys.stdout.buffer.write(b'first' + os.urandom(30 << 20) + b'last')"
    ),
    "works": lambda setup: script("works", "print('all well')"),
    "blocks": lambda setup: script(
        "blocks", "import shutil, sys; shutil.rmtree(sys.argv[1]); open(sys.argv[1], 'w')", sys.argv[-1]
    ),
}


# What a part of the decisive call does here, where it does not go well; the last one leaves a child behind.
SPOILED = {
    "ring": "import time; time.sleep(99)",
    "layer": "raise SystemExit('no launch works')",
    "llava-1.5-7b": "import os; os.kill(os.getpid(), 9)",
    "colocate-llava-1.5-7b": "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; "
    "time.sleep(99)']); print(child.pid, flush=True); child.wait()",
}
# Documents without the figures that answers are made of.
_ODD = """
import json, sys
for name, document in {"products": {"rows": [{"what": "gate/up", "peers": {}}]}, "layer": {"rows": 3},
                       "serve-llava-1.5-7b": ["no document"]}.items():
    open(f"{sys.argv[1]}/{name}.json", "w").write(json.dumps(document))
"""
_COUNTS = """
import json, sys, tarfile
with tarfile.open(sys.argv[1]) as archive:
    print(len(json.load(archive.extractfile("gpu-check/check.json"))["parts"]))
"""


def decided(setup: Setup, archive: str) -> list[Part]:
    """The parts of the decisive call in their order. A part that goes well says how many
    parts the archive knows of when it begins; the first writes documents that answer nothing."""
    found = []
    for part in decisive(setup):
        code = SPOILED.get(part.name, _COUNTS)
        limit_s = 1.5 if part.name in SPOILED else 20.0
        found.append(script(part.name, code, archive, limit_s=limit_s, unless=part.unless))
    found[0] = script("build", _ODD + _COUNTS.replace("argv[1]", "argv[2]"), str(setup.folder), archive)
    return found


if __name__ == "__main__":
    wanted = sys.argv[1].split(",")
    stand_in = Machine("", "a GPU that is made up", "90", None)

    def plan(call: str, setup: Setup) -> list[Part]:
        if call == "decide":
            return decided(setup, str(Path(sys.argv[sys.argv.index("--dir") + 1]) / ARCHIVE))
        return [PARTS[name](setup) for name in wanted]

    sys.exit(main(sys.argv[2:], lambda: stand_in, plan))
