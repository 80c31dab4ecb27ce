"""A copy of the package without the parts that only some deployments need serves the demo."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.test_layers import HOOKS, OPTIONAL_PARTS, PACKAGE, ROOT

NO_HOOKS = """
from types import SimpleNamespace

from hydra_engine.core.reports import LimitSummary
from hydra_engine.instance.instance import MigrationPort
from hydra_engine.worker.ports import NO_GATE

Connect = Hooks = object


def make_gate(*given):
    return NO_GATE


def make_hooks(*given):
    return SimpleNamespace(
        budgets=None, observer=None, connector=None, migration=MigrationPort(), limits=LimitSummary(), notes=()
    )
"""
SCRIPT = """
import json
import sys
from pathlib import Path

from PIL import Image

import hydra_engine

if __name__ == "__main__":
    home = Path(hydra_engine.__file__).parent
    assert home == Path(sys.argv[1]), "not the copy"
    (asked, *_) = json.loads((home / "demo" / "questions.json").read_text())
    with hydra_engine.Engine("demo") as engine:
        image = Image.open(home / "demo" / asked["picture"])
        answer = engine.generate(asked["question"], image, temperature=0, max_tokens=64)
    assert answer.text.strip() == asked["answer"], answer.text
    print([span.stage for span in answer.timeline if span.stage in ("encode", "prefill", "decode")])
"""


def package_without_optional_parts(folder: Path) -> Path:
    copy = folder / "hydra_engine"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for part in OPTIONAL_PARTS:
        if (copy / part).is_dir():
            shutil.rmtree(copy / part)
        else:
            (copy / part).unlink()
    (copy / HOOKS).write_text(NO_HOOKS)
    return copy


@pytest.mark.slow
def test_the_demo_answers_without_the_optional_parts(tmp_path: Path) -> None:
    copy = package_without_optional_parts(tmp_path)
    script = tmp_path / "answer.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(script), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'encode', 'prefill'" in done.stdout and "'decode'" in done.stdout


@pytest.mark.slow
def test_the_scheduler_passes_its_tests_without_the_optional_parts(tmp_path: Path) -> None:
    """Collecting the tests imports all of it; those in subfolders are about the optional parts."""
    shutil.rmtree(package_without_optional_parts(tmp_path) / "transfer")
    for folder in ("tests", "tests/cache", "tests/scheduler"):
        (tmp_path / folder).mkdir()
        for path in (ROOT / folder).glob("*.py"):
            shutil.copy(path, tmp_path / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "tests/scheduler"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=450)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
