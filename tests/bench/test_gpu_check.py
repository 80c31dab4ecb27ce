"""`make gpu-check`: which parts there are, which of them run where, and a run from the command line without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import gpu_check
from bench.gpu_check import Machine, chosen, plan
from bench.micro.goals import BENCHES

ROOT = Path(__file__).parents[2]
HOPPER = Machine("", "a GPU", "90", "/usr/bin/nvcc")


def names(*, only: tuple[str, ...] = (), skip: tuple[str, ...] = ()) -> list[str]:
    return [part.name for part in chosen(plan(Path("/results"), HOPPER, jobs=4), only, skip)]


def test_what_comes_first_is_what_the_rest_depends_on() -> None:
    found = names()
    assert found[:2] == ["build", "tests-gpu"]
    assert found.index("quick-ceilings") < found.index("quick-decode") < found.index("full-ceilings")
    assert [name for name in found if name.startswith("quick-")] == [f"quick-{bench}" for bench in BENCHES]
    for bench in ("decode", "encode"):
        shapes = [name.removeprefix(f"full-{bench}-") for name in found if name.startswith(f"full-{bench}-")]
        assert shapes == ["llava-1.5-7b", "qwen2.5-vl-7b", "qwen2-vl-7b"]
    assert found.index("full-migrate") < found.index("full-decode-qwen2-vl-7b") < found.index("quick-sched")
    assert len(set(found)) == len(found)


def test_every_benchmark_of_the_plan_exists() -> None:
    for part in plan(Path("/results"), HOPPER, jobs=4):
        module = part.command[2]
        if module.startswith("bench."):
            assert importlib.util.find_spec(module) is not None, module


def test_the_build_is_for_the_gpu_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYDRA_CUDA_ARCHS", raising=False)
    build = plan(Path("/results"), HOPPER, jobs=16)[0]
    assert build.environment == {"HYDRA_BUILD_JOBS": "16", "HYDRA_CUDA_ARCHS": "90"}
    nothing = plan(Path("/results"), Machine("no GPU", "", "", None), jobs=16)[0]
    assert nothing.environment == {"HYDRA_BUILD_JOBS": "16"}
    monkeypatch.setenv("HYDRA_CUDA_ARCHS", "80;90")
    assert plan(Path("/results"), HOPPER, jobs=1)[0].environment["HYDRA_CUDA_ARCHS"] == "80;90"


def test_parts_are_chosen_by_name_by_beginning_and_by_benchmark() -> None:
    tests = ["tests-gpu", "tests-device", "tests-native", "tests-compiled"]
    assert names(only=("build", "tests")) == ["build", *tests]
    assert names(only=("ceilings",)) == ["quick-ceilings", "full-ceilings"]
    assert names(only=("quick",), skip=("decode", "cpu_decode"))[:2] == ["quick-ceilings", "quick-prefill"]
    assert names(only=("full-decode-qwen2-vl-7b",)) == ["full-decode-qwen2-vl-7b"]
    assert "quick-attn_decode" in names(skip=("decode",)), "a benchmark is not part of another one's name"
    with pytest.raises(ValueError, match="no part 'sceilings'; there are: build,"):
        names(only=("sceilings",))


def test_what_shares_the_device_runs_in_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def commands() -> dict[str, str]:
        return {part.name: " ".join(part.command) for part in plan(Path("/results"), HOPPER, jobs=16)}

    found = commands()
    assert "-n 8 --dist worksteal -m cuda and not alone" in found["tests-gpu"]
    assert "-n " not in found["tests-device"] and "-m cuda and alone" in found["tests-device"]
    monkeypatch.setattr(gpu_check, "missing", lambda names: [name for name in names if name == "xdist"])
    assert "-n " not in commands()["tests-gpu"]


def test_without_the_build_the_rest_takes_the_one_that_is_there() -> None:
    parts = plan(Path("/results"), HOPPER, jobs=4)
    assert {part.after for part in chosen(parts, ("tests",), ())} == {None}
    assert {part.after for part in chosen(parts, ("build", "tests"), ())} == {None, "build"}


def test_missing_packages_are_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_check.PACKAGES, "no_such_module_here", "an example")
    lines = gpu_check.introduce(Machine("", "a GPU", "90", None))
    assert lines[0].startswith("Python ") and "GPU: a GPU; nvcc: none" in lines[1]
    assert lines[2] == "packages missing: 1" and lines[3] == "  no_such_module_here: without it goes an example"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_runs_the_rest_and_fails(tmp_path: Path) -> None:
    """From another folder, with a path of the environment that must not be lost."""
    command = [sys.executable, "-m", "bench.gpu_check", "--dir", str(tmp_path / "results"), "--budget", "60"]
    command += ["--only", "tests-gpu,quick-ceilings,full,sched"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("gpu-check, ") and "failed: no GPU (torch finds no GPU" in last
    written = {path.name for path in (tmp_path / "results").iterdir()}
    assert {"check.json", "summary.md", "quick-sched.json", "quick-sched.log"} <= written
    document = json.loads((tmp_path / "results" / "check.json").read_text())
    assert [part["name"] for part in document["parts"]] == ["quick-sched"]
    assert document["parts"][0]["state"] == "ok" and document["machine"]["problem"]
    assert "256 running, 64 waiting" in (tmp_path / "results" / "summary.md").read_text()


@pytest.mark.slow
def test_a_wrong_word_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--dir", str(tmp_path), "--only", "nonsense"]) == 2
    assert "there is no part 'nonsense'" in capsys.readouterr().err


@pytest.mark.slow
def test_settings_of_the_tests_need_no_plugin(tmp_path: Path) -> None:
    """A folder of tests runs under them, an unknown marker is refused, and a warning fails nothing."""
    (tmp_path / "pytest.ini").write_text(gpu_check._INI)
    (tmp_path / "test_it.py").write_text(
        "import warnings, pytest\n@pytest.mark.cuda\ndef test_it():\n    warnings.warn('of another version')\n"
        "def test_other():\n    raise AssertionError\n"
    )
    plugins = [f"-p no:{name}" for name in ("asyncio", "pytest_asyncio", "timeout", "xdist", "anyio")]
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(tmp_path / "pytest.ini"), *" ".join(plugins).split()]
    done = subprocess.run(
        [*command, "-m", "cuda", str(tmp_path / "test_it.py")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "1 passed, 1 deselected" in done.stdout, done.stdout
