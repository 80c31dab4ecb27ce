"""`make gpu-check`: which parts there are and how long they take, what it asks of a machine, and the wheels for one."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import common
from bench.gpu_check import __main__ as command
from bench.gpu_check import commands as runs
from bench.gpu_check import machine as on_machine
from bench.gpu_check import plan, wheels
from bench.gpu_check.commands import Setup, files_by_kind
from bench.gpu_check.machine import PACKAGES, Machine, min_versions, too_old, unknown, unknown_packages
from bench.gpu_check.plan import CALLS, chosen, parts_of
from bench.micro.goals import BENCHES
from bench.micro.parts import Part

ROOT = Path(__file__).parents[2]
HOPPER = Machine("", "a GPU", "90", "/usr/bin/nvcc")


def parts(call: str, machine: Machine = HOPPER, jobs: int = 16) -> list[Part]:
    return parts_of(call, Setup(Path("/results"), machine, jobs))


def names(call: str, *, only: tuple[str, ...] = (), skip: tuple[str, ...] = ()) -> list[str]:
    return [part.name for part in chosen(parts(call), only, skip)]


# ---- the plan


def test_what_says_most_in_a_second_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "sanitizer", lambda machine: "/usr/bin/compute-sanitizer")
    first = [name for name in names("first") if not name.endswith("-again")]
    assert first[:7] == [
        "build",
        "tests-ops",
        "quick-ceilings",
        "llava-1.5-7b",
        "tests-engine",
        "tests-device",
        "sanitizer",
    ]
    commands = {part.name: " ".join(part.command) for part in parts("first")}
    assert " decode,profile " in commands["llava-1.5-7b"] and "--no-peers" in commands["llava-1.5-7b"]
    second = [name for name in names("second") if not name.endswith("-again")]
    assert first[7:] == second[2:], "where it has seconds left"
    beyond = [part for part in parts("first") if part.name in second[2:]]
    assert all(part.planned_s == 0 for part in beyond), "which it keeps for nothing of its own"
    assert second[:2] == ["build", "quick-ceilings"] and not any(name.startswith("tests") for name in second)
    assert second[-2:] == ["peers-llava-1.5-7b", "peers-qwen2.5-vl-7b"]


@pytest.mark.parametrize("call", ["first", "second", "decide"])
def test_the_seconds_of_a_call_fit_its_budget(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A part gets what is planned for it, whatever the others take."""
    monkeypatch.setattr(runs, "sanitizer", lambda machine: "/usr/bin/compute-sanitizer")
    found = parts(call)
    beyond = {part.name for part in parts("second")} if call == "first" else set()
    own = [part for part in found if part.name not in beyond or part.name in ("build", "quick-ceilings")]
    assert plan.START_S + sum(part.planned_s for part in found) + plan.SUMMARY_S <= plan.BUDGET_S
    assert all(part.min_s <= part.planned_s <= part.limit_s for part in own if part.unless is None)


def test_the_sanitizer_leaves_out_a_test_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test would allocate while it captures."""
    monkeypatch.setattr(runs, "sanitizer", lambda machine: "/usr/bin/compute-sanitizer")
    (part,) = [part for part in parts("first") if part.name == "sanitizer"]
    path, _, test = part.command[part.command.index("--deselect") + 1].partition("::")
    assert path == part.command[-1] and f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")


def test_every_benchmark_of_a_gpu_is_in_a_call() -> None:
    """Reads the words of the commands; modules and models of them exist too."""
    said = {word for call in ("first", "second", "decide") for part in parts(call) for word in part.command}
    said |= {bench for word in said for bench in word.split(",")}
    said |= {word.removeprefix("bench.micro.") for word in said}
    processor = {"sched", "step_parts", "preprocess", "frontend", "cpu_decode"}
    assert set(BENCHES) - processor <= said and not processor & said
    for part in (part for call in CALLS for part in parts(call)):
        module = part.command[part.command.index("-m") + 1] if "-m" in part.command else ""
        assert not module.startswith("bench.") or importlib.util.find_spec(module) is not None, module
        assert not part.name.startswith("tests") or "--ceilings" not in part.command
    for model in (plan.LLAVA, plan.QWEN, plan.TWIN):
        assert [*(ROOT / "hydra_engine" / "models" / "shapes").rglob(model)], model


def test_each_file_of_the_gpu_tests_is_in_one_part_and_those_without_triton_come_first() -> None:
    ops, engine, device, instances = files_by_kind()
    assert sorted([*ops, *engine, *device, *instances]) == sorted(
        path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/gpu").glob("test_*.py")
    )
    assert ops[:2] == ["tests/gpu/test_cache_ops.py", "tests/gpu/test_ops.py"]
    assert instances == ["tests/gpu/test_instances.py"]
    assert "tests/gpu/test_engine.py" in engine and "tests/gpu/test_ipc.py" in device


def test_a_plugin_that_warns_in_every_process_is_left_out() -> None:
    for part in parts("first"):
        words = " ".join(part.command)
        assert (" -m pytest " not in words) or " -p no:benchmark" in words, part.name


def test_what_breaks_in_one_process_goes_on_in_another() -> None:
    again = {part.name: part for part in parts("second") if part.unless}
    assert all(part.command[-1] == "--resume" and not part.planned_s for part in again.values())
    assert {part.unless for part in again.values()} >= {"qwen2.5-vl-7b", "operations", "peers-llava-1.5-7b"}
    assert [part.name for part in chosen(parts("second"), ("qwen2.5-vl-7b-again",), ())] == []


def test_the_build_is_for_the_gpu_that_is_here_and_not_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYDRA_CUDA_ARCHS", raising=False)
    asked = {"HYDRA_BUILD_JOBS": "16", "HYDRA_REQUIRE_CUDA": "1"}
    assert parts("first")[0].environment == asked | {"HYDRA_CUDA_ARCHS": "90"}
    assert all(part.after == "build" for part in parts("first")[1:])
    monkeypatch.setenv("HYDRA_CUDA_ARCHS", "80;90")
    assert parts("first")[0].environment["HYDRA_CUDA_ARCHS"] == "80;90"


def test_tests_run_in_processes_of_which_each_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def commands() -> dict[str, str]:
        return {part.name: " ".join(part.command) for part in parts("first")}

    found = commands()
    assert "-n 14 --dist worksteal" in found["tests-ops"] and "-m cuda and not alone" in found["tests-ops"]
    assert "-n 1 --dist worksteal" in found["tests-device"]
    assert "--timeout=60 --timeout-method=thread" in found["tests-engine"]
    monkeypatch.setattr(runs, "missing", lambda names: [name for name in names if name == "xdist"])
    assert "-n " not in commands()["tests-ops"]


def test_parts_are_chosen_by_name_by_beginning_and_by_benchmark() -> None:
    assert names("first", only=("build", "tests")) == [
        "build",
        "tests-ops",
        "tests-engine",
        "tests-device",
    ]
    assert names("second", only=("colocate",)) == ["colocate-llava-1.5-7b", "colocate-qwen2.5-vl-7b"]
    assert "quick-ceilings" not in names("second", skip=("ceilings",))
    with pytest.raises(ValueError, match="no part 'sceilings'; there are: build,"):
        names("first", only=("sceilings",))


def test_a_part_that_is_chosen_is_that_of_the_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[Part] = []
    monkeypatch.setattr(command.Runner, "run", lambda self, parts: ran.extend(parts))
    monkeypatch.setattr(command.Check, "_provide", lambda self, parts: None)
    for call in ("--second", "--decide", ""):
        command.main(["--dir", str(tmp_path), "--only", "colocate-llava", *filter(None, [call])], lambda: HOPPER)
    found = [part for part in ran if part.name == "colocate-llava-1.5-7b"]
    assert ["--beside-only" in part.command for part in found] == [False, True, False]


def test_without_the_build_the_rest_takes_the_one_that_is_there() -> None:
    assert {part.after for part in chosen(parts("first"), ("tests",), ())} == {None}
    assert {part.after for part in chosen(parts("first"), ("build", "tests"), ())} == {None, "build"}


def test_the_commit_that_is_said_goes_before_that_of_a_repository_around_a_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert common.commit() is None
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    for arguments in (("init", "-q"), (*who, "commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    head = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=tmp_path, text=True).strip()
    assert common.commit() == head
    monkeypatch.setenv("BENCH_COMMIT", "5ff2c10")
    assert common.commit() == common.card()["commit"] == "5ff2c10"


# ---- what is asked of the machine


def test_packages_are_those_of_the_project_with_the_versions_that_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = min_versions()
    assert asked["setuptools"] == "77" and asked["torch"] == "2.11" and asked["pytest-xdist"] == "3.8"
    assert not [text for module in PACKAGES if (text := too_old(module))], "what is installed here is new enough"
    monkeypatch.setattr(on_machine.metadata, "version", lambda name: "65.5.0+local")
    assert too_old("setuptools") == "setuptools 65.5.0+local is older than 77"
    every = {module for call in CALLS for part in parts(call) for module in part.packages}
    assert every <= set(PACKAGES), "each can be named where it is missing"


def refusal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any, *flags: str, **machine: Any) -> str:
    """Last line of a check on a machine with a GPU on which a module is missing."""
    monkeypatch.setitem(PACKAGES, "no_such_module_here", ("no-such-module", "an example"))
    monkeypatch.setattr(wheels, "FOLDER", tmp_path / ".whl")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")

    def one(call: str, setup: Setup) -> list[Part]:
        return [Part("build", ("false",), 9.0, packages=("no_such_module_here",))]

    assert command.main(["--dir", str(tmp_path / "out"), *flags], lambda: Machine(**machine), one) == 2
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"gpu-check.tar.gz", "summary.md"}
    last: str = capsys.readouterr().out.splitlines()[-1]
    assert last.partition("refused. ")[2] in (tmp_path / "out" / "summary.md").read_text()
    return last


def test_a_machine_that_lacks_a_package_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"problem": "", "gpu": "a GPU", "capability": "90", "nvcc": None}
    said = refusal(monkeypatch, tmp_path, capsys, **found)
    assert "refused. missing: no_such_module_here (without it goes: an example)." in said
    assert "run `make gpu-wheels`, and carry the folder .whl/" in said


def test_a_machine_without_a_gpu_and_a_wrong_word_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = {"problem": "torch finds no GPU", "gpu": "", "capability": "", "nvcc": None}
    assert "refused. no GPU: torch finds no GPU" in refusal(monkeypatch, tmp_path, capsys, **nothing)
    found = {"problem": "", "gpu": "a GPU", "capability": "90", "nvcc": None}
    assert "there is no part 'nonsense'" in refusal(monkeypatch, tmp_path, capsys, "--only", "nonsense", **found)


def test_an_optional_package_that_cannot_be_installed_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(PACKAGES, "no_such_module_here", ("no-such-module", "an example"))
    monkeypatch.setattr(command, "OPTIONAL", ("no_such_module_here", "pytest"))
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    asked: list[list[str]] = []

    def install(modules: list[str], folder: Path, target: Path) -> str:
        asked.append(modules)
        return "no wheel for this Python" if modules else ""

    def one(call: str, setup: Setup) -> list[Part]:
        return [Part("parts", ("true",), 9.0)]

    monkeypatch.setattr(wheels, "install", install)
    assert command.main(["--dir", str(tmp_path)], lambda: HOPPER, one) == 0
    assert asked == [[], ["no_such_module_here"]]
    said = "FlashInfer is left out, its wheels cannot be installed: no wheel for this Python"
    assert said in (tmp_path / "summary.md").read_text()
    assert os.environ["FLASHINFER_DISABLE_JIT"] == "1", "no part waits for a kernel to be compiled"


def test_flashinfers_tests_are_among_those_of_operations() -> None:
    ops, *_ = files_by_kind()
    assert "tests/gpu/test_flashinfer.py" in ops


def test_what_no_check_has_run_on_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.11.0+cu130", "triton": "3.6.0", "transformers": "5.17.0"}
    monkeypatch.setattr(on_machine, "_version", installed.get)
    monkeypatch.setattr(on_machine.platform, "python_version", lambda: "3.12.3")
    known = Machine("", "NVIDIA H200", "90", "/usr/bin/nvcc", "580.159.04", "13.0")
    assert unknown(known) == [] == unknown_packages()
    assert unknown(replace(known, driver="58.0")) == ["driver 58.0: known is 580"], "not by its first letters"
    installed |= {"torch": "2.13.0", "triton": "", "flashinfer-python": "0.7.2"}
    other = replace(known, gpu="NVIDIA B200", driver="", toolkit="13.1")
    assert [text.partition(":")[0] for text in unknown(other)] == ["card NVIDIA B200", "driver", "nvcc 13.1"]
    assert "nothing says its version" in unknown(other)[1]
    assert unknown_packages() == [
        "torch 2.13.0: known is 2.11",
        "triton: nothing says its version; known is 3.6",
        "flashinfer-python 0.7.2: no check has run with it",
    ]


def test_packages_that_are_not_known_are_named_once_wheels_are_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packages that come from a wheel have a version then; nothing has run yet."""
    installed = {"torch": "2.11.0", "triton": "3.6.0"}
    monkeypatch.setattr(on_machine, "_version", lambda name: installed.get(name, ""))
    monkeypatch.setattr(command.Check, "_provide", lambda self, parts: installed.update(transformers="6.0"))
    monkeypatch.setattr(command.Runner, "run", lambda self, parts: print("now the parts"))
    assert command.main(["--dir", str(tmp_path)], lambda: HOPPER, lambda call, setup: []) == 0
    before = capsys.readouterr().out.partition("now the parts")[0]
    assert "not known: transformers 6.0: known is 5.17" in before and "transformers: nothing says" not in before


# ---- wheels


def test_wheels_have_the_versions_of_the_constraints() -> None:
    found = dict(word.split("==") for word in wheels.pinned([*wheels.USUALLY_ABSENT, "flashinfer-python==0.7.2"]))
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert {f"{name}=={found[name]}" for name in wheels.USUALLY_ABSENT} <= set(lines)
    assert found["flashinfer-python"] == "0.7.2"
    with pytest.raises(SystemExit, match="no version of flashinfer-python"):
        wheels.pinned(["flashinfer-python"])


def make_wheel(folder: Path, name: str, version: str, *, requires: str = "") -> Path:
    import zipfile

    folder.mkdir(exist_ok=True)
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", f"VERSION = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.slow
def test_what_is_missing_is_installed_from_its_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs pip without a network; the target is a folder of its own."""
    monkeypatch.setitem(PACKAGES, "no_such_module_here", ("no-such.module_here", "an example"))
    requires = "Requires-Dist: numpy>=2\nRequires-Dist: tornado; extra == 'web'\n"
    wheel = make_wheel(tmp_path / ".whl", "no_such_module_here", "1.2", requires=requires)
    assert wheels.needs(wheel) == ["numpy"]
    assert wheels.install(["numpy"], tmp_path / ".whl", tmp_path / "site") == ""
    assert not (tmp_path / "site").exists(), "no wheel of it: what is here stays"
    assert wheels.install(["no_such_module_here"], tmp_path / ".whl", tmp_path / "site") == ""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    code = "import no_such_module_here as m; print(m.VERSION)"
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "1.2\n"
    wheel.write_bytes(b"half of a wheel")
    assert "no_such_module_here-1.2" in wheels.install(["no_such_module_here"], tmp_path / ".whl", tmp_path / "other")


# ---- the build


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The functions of setup.py."""
    import setuptools

    for name in [name for name in os.environ if name.startswith(("HYDRA_", "CUDA_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    return SimpleNamespace(**runpy.run_path(str(ROOT / "setup.py")))


def compiler(folder: Path) -> str:
    """An nvcc that says its version and where it belongs, without a runtime beside it."""
    path = folder / "nvcc"
    path.write_text(f'#!/bin/sh\ncase $1 in --version) echo release 13.0, V13;; *) echo "TOP={folder}" >&2;; esac\n')
    path.chmod(0o755)
    return str(path)


def test_a_build_that_leaves_cuda_out_fails_where_it_is_asked_for(
    build: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NVCC", compiler(tmp_path))
    assert build.toolkit() is None and "CUDA is left out: " in capsys.readouterr().out
    monkeypatch.setenv("HYDRA_REQUIRE_CUDA", "1")
    with pytest.raises(SystemExit, match=r"asks for it: .*nvcc has no libcudart_static.a beside it, nor has torch's"):
        build.toolkit()


def test_the_runtime_of_torch_will_do(build: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files lie as nvidia-cuda-runtime has them; only the runtime of nvcc's CUDA is taken."""
    monkeypatch.setenv("NVCC", compiler(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("cu12", "cu13"):
        (tmp_path / "nvidia" / name / "lib").mkdir(parents=True)
        (tmp_path / "nvidia" / name / "lib" / "libcudart_static.a").write_bytes(b"")
    importlib.invalidate_caches()
    assert build.toolkit().runtime == tmp_path / "nvidia" / "cu13" / "lib" / "libcudart_static.a"
