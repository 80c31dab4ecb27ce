"""Packages and output of a first `make demo`: no more than what runs the engine, every version pinned."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import bootstrap

ROOT = Path(__file__).parents[2]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(requirements: list[str]) -> set[str]:
    """Names of the distributions that `requirements` name, and of all that they need, as installed here."""
    found: set[tuple[str, str]] = set()
    left = [(Requirement(one), extra) for one in requirements for extra in ("", *Requirement(one).extras)]
    while left:
        requirement, extra = left.pop()
        if (key := (canonical(requirement.name), extra)) in found:
            continue
        found.add(key)
        for text in needs(requirement.name):
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                left += [(needed, more) for more in ("", *needed.extras)]
    return {name for name, _ in found}


def needs(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:  # an environment that is older than constraints.txt
        return []


def pinned() -> set[str]:
    lines = bootstrap.CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    return {canonical(line.split("==")[0]) for line in lines if not line.startswith("#")}


def test_what_runs_the_engine_is_half_of_what_tests_it() -> None:
    running = closure([*bootstrap.requirements(dev=False), "setuptools", "pybind11"])
    assert len(running) <= 56 and running <= pinned()
    tools = {"pytest", "hypothesis", "mypy", "ruff", "openai", "anthropic", "playwright", "matplotlib", "triton", "av"}
    assert not running & tools


def test_every_pin_is_of_something_that_is_installed() -> None:
    named = closure(bootstrap.requirements(dev=True))
    assert named <= pinned()
    # What something needs is known once it is installed; `make build` does that.
    if named <= {canonical(distribution.name) for distribution in metadata.distributions()}:
        assert named == pinned()


def test_every_extra_is_there_for_the_tests() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {name for extra in extras.keys() - {"cuda", "processors", "ray", "nixl"} for name in extras[extra]}
    wanted |= {name for name in extras["cuda"] if name.startswith("triton")}
    assert wanted <= set(bootstrap.requirements(dev=True))


def test_without_a_compiler_it_is_one_sentence_and_nothing_is_made(tmp_path: Path) -> None:
    copy = tmp_path / "bootstrap.py"
    copy.write_bytes((ROOT / "bootstrap.py").read_bytes())
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-S", copy], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(
        r"hydra-engine: there is no C\+\+ compiler.* here\. .*`apt-get install g\+\+.*`.*\n", done.stderr
    )
    assert [path.name for path in tmp_path.iterdir()] == ["bootstrap.py"]


def test_sizes_and_numbers_are_those_that_pip_tells() -> None:
    fetched = bootstrap.Fetched(
        "Collecting numpy\n"
        "  Downloading https://index/packages/numpy-2.4.6-cp311.whl (16.2 MB)\n"
        "Using cached tqdm-4.70.1-py3-none-any.whl (800 kB)\n"
        "Installing collected packages: tqdm, numpy\n"
        "Successfully installed numpy-2.4.6 tqdm-4.70.1\n"
    )
    assert str(fetched) == "2 packages, 17 MB"
    assert str(bootstrap.Fetched("Requirement already satisfied: numpy in ./lib\n")) == "is there"


@pytest.mark.parametrize("has_driver", [False, True])
def test_torch_is_the_build_for_this_machine(monkeypatch: pytest.MonkeyPatch, has_driver: bool) -> None:
    """An index that has no build for processors alone is that of PyPI: then torch's own is asked."""
    asked: list[tuple[str, ...]] = []

    def pip(*arguments: str) -> bootstrap.Fetched:
        asked.append(arguments)
        if arguments[0].endswith("+cpu"):
            raise bootstrap.Failed("no matching distribution")
        return bootstrap.Fetched("")

    monkeypatch.setattr(bootstrap, "pip", pip)
    monkeypatch.setattr(bootstrap, "has_driver", lambda: has_driver)
    bootstrap.install(dev=False)
    version = f"torch=={bootstrap.pinned('torch')}"
    if has_driver:
        assert asked[:-1] == [(version,)]
    else:
        assert asked[:-1] == [(version + "+cpu",), (version, "--no-deps", "--index-url", bootstrap.CPU_INDEX)]
    assert "transformers>=5.17,<6" in asked[-1]


def test_the_first_compilation_says_how_long_it_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    assert bootstrap.compilation(dev=False).endswith("C++; 3 to 5 minutes on two cores")
    (tmp_path / "hydra_engine").mkdir()
    (tmp_path / "hydra_engine" / "_C.so").touch()
    assert bootstrap.compilation(dev=False).endswith("C++")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_how_many_files_are_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setenv("COLUMNS", "60")
    written = "CUDA is left out: no nvcc found\ncompiling 1 of 64: csrc/a.cpp\ncompiling 2 of 64: csrc/b.cpp\n"
    child = (
        f"import time; print({written!r}, end='', flush=True); time.sleep(0.15); print('its end'); raise SystemExit(3)"
    )
    with tempfile.TemporaryFile("w+") as log:
        step = bootstrap.Step(4, "extension    C++; 3 to 5 minutes on two cores")
        assert step.follow(subprocess.Popen([sys.executable, "-S", "-c", child], stdout=log), log.fileno()) == 3
        log.seek(0)
        assert log.read() == written + "its end\n"  # reading it has not moved where the child writes
    shown = capsys.readouterr().out
    assert ("4/4 extension    C++; 3 to 5 minutes on two ; 2 of 64 files" in shown) == is_terminal
    assert shown.endswith("4/4 extension    C++; 3 to 5 minutes on two cores") and ("\r" in shown) == is_terminal
