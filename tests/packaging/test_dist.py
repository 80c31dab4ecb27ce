"""`make dist`: the same bytes each time, a wheel that an index takes, that holds what it must and no more and runs
without the tree; the sdist builds elsewhere."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import files, packages_distributions
from pathlib import Path

import pytest
from setuptools import find_packages

import bootstrap
import hydra_engine
from tests.architecture.sources import PACKAGES
from tools import dist

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSION = hydra_engine.__version__
# Their owner is a dependency that always has them.
BROUGHT_ALONG = {
    "aiohappyeyeballs": "aiohttp",
    "huggingface_hub": "transformers",
    "tokenizers": "transformers",
    "yarl": "aiohttp",
}

WHERE = """
import sys, hydra_engine, hydra_kernels
from hydra_engine import _C
print(hydra_engine.__file__, hydra_kernels.__path__[0], _C.__file__, *sys.path, sep="\\n")
"""


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Runs without a network and without this process's variables for paths."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "HYDRA_"))}
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=kept | offline | variables, capture_output=True, text=True, timeout=1700
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def make_dist(folder: Path) -> tuple[Path, Path]:
    """The sdist and this Python's wheel; fetches what builds them, if it is not here yet."""
    command = [sys.executable, "-m", "tools.dist", "--dir", str(folder), sys.executable]
    environment = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    sdist, wheel = sorted(folder.iterdir(), key=lambda path: path.suffix)
    assert f"torch=={bootstrap.pinned('torch')}+cpu {os.path.relpath(wheel, ROOT)}\n" in done.stdout
    return sdist, wheel


def check_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(f"hydra_engine-{VERSION}.dist-info/METADATA").decode()
    assert f"\nVersion: {VERSION}\n" in metadata and "\nRequires-Python: >=3.11\n" in metadata
    (extension,) = (name for name in held if name.endswith(".so"))
    assert extension == f"hydra_engine/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES, "kernels/hydra_kernels"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if tracked.returncode:
        pytest.skip("not a clone: what the wheel must hold is not known")
    # Everything below the packages, static files and the shipped model too; and nothing from anywhere else.
    wanted = {name.removeprefix("kernels/") for name in tracked.stdout.split() if (ROOT / name).exists()}
    assert held - {extension} == wanted
    assert {
        "hydra_engine/py.typed",
        "hydra_engine/_C.pyi",
        "hydra_engine/server/page/static/index.html",
        "hydra_engine/demo/model/model.safetensors",
        "hydra_engine/demo/pictures/stars.png",
    } <= held


def check_it_runs(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel)
    run(*pip, cwd=tmp_path)
    path = {"PYTHONPATH": str(target)}
    package, kernels, extension, *searched = run(sys.executable, "-c", WHERE, cwd=tmp_path, **path).splitlines()
    assert all(Path(found).is_relative_to(target) for found in (package, kernels, extension))
    before = searched[: searched.index(str(target))]
    assert not any(Path(folder).is_relative_to(ROOT) for folder in before if folder)
    version = run(sys.executable, "-m", "hydra_engine", "--version", cwd=tmp_path, **path)
    assert version == f"hydra-engine {VERSION}\n"
    listed = run(sys.executable, "-m", "hydra_engine", "--help", cwd=tmp_path, **path)
    for line in ("plan +find the topology", "chat +chat with", "quantize +write a checkpoint"):  # of other packages
        assert re.search(f"^ +{line}", listed, re.MULTILINE)
    assert "--workload FILE" in run(sys.executable, "-m", "hydra_engine", "plan", "--help", cwd=tmp_path, **path)
    assert "--url URL" in run(sys.executable, "-m", "hydra_engine", "chat", "--help", cwd=tmp_path, **path)
    question = ("generate", "Describe the picture.", "--image", target / "hydra_engine/demo/pictures/stars.png")
    script = target / "bin" / "hydra-engine"
    answer = run(script, *question, "--temperature", "0", "--threads", "1", cwd=tmp_path, **path)
    assert answer.startswith("There is a blue triangle in the top-centre, a pink star in the middle-left")


@pytest.mark.slow
@pytest.mark.timeout(1800)  # compiles
def test_make_dist_gives_the_same_bytes_and_a_wheel_that_an_index_takes_and_that_runs(tmp_path: Path) -> None:
    if not (ROOT / "build" / "native").exists():
        pytest.skip("nothing is built here yet (`make build`)")
    first, second = make_dist(tmp_path / "first"), make_dist(tmp_path / "second")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    wheel = first[1]
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert re.fullmatch(rf"hydra_engine-{VERSION}-{tag}-{tag}-manylinux_2_\d\d_x86_64\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        held = {info.filename: info for info in archive.infolist()}
        assert {info.date_time for info in held.values()} == {(2023, 11, 14, 22, 13, 20)}
        (extension,) = (name for name in held if name.endswith(".so"))
        content = archive.read(extension)
    # The machine's own C++ runtime and its folders are not in it.
    assert b"libstdc++.so" not in content and str(ROOT).encode() not in content
    licences = f"hydra_engine-{VERSION}.dist-info/licenses"
    assert {f"{licences}/LICENSE", f"{licences}/csrc/LICENSE.pybind11"} <= held.keys()
    check_files(wheel)
    check_it_runs(wheel, tmp_path)


# In place of a compiler: reads and checks what that would, and leaves an empty object.
CHECKER = """#!/bin/sh
for last; do :; done
case " $* " in
  *" -c "*) c++ "$@" -fsyntax-only && exec c++ -fPIC -x c++ -c /dev/null -o "$last" ;;
  *) exec c++ "$@" ;;
esac
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)  # compiles
def test_the_sdist_has_everything_that_the_compiler_needs(tmp_path: Path) -> None:
    (checker := tmp_path / "checker").write_text(CHECKER)
    checker.chmod(0o700)
    sdist, _ = make_dist(tmp_path / "dist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / f"hydra_engine-{VERSION}"
    assert not [name for name in ("tests", "bench", "docs", "deploy", "tools", "build") if (source / name).exists()]
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps")
    run(*pip, "--wheel-dir", tmp_path / "wheels", source, cwd=tmp_path, HYDRA_CPU_ONLY="1", CXX=str(checker))
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    check_files(wheel)


def test_dates_modes_and_order_of_files_do_not_come_from_the_machine(tmp_path: Path) -> None:
    held = {"a/x.py": b"1", "a/_C.so": b"2", "a-1.dist-info/METADATA": b"3", "a-1.dist-info/RECORD": b"a/x.py,,\n"}
    for kind, order in (("first", list(held)), ("second", list(reversed(held)))):
        with zipfile.ZipFile(tmp_path / f"{kind}.whl", "w") as archive:
            for name in order:
                info = zipfile.ZipInfo(name, (2001 if kind == "first" else 2002, 1, 1, 0, 0, 0))
                info.external_attr = (0o100600 if kind == "first" else 0o100777) << 16
                archive.writestr(info, held[name])
        dist.normalise_wheel(tmp_path / f"{kind}.whl", tmp_path / f"{kind}-clean.whl", 1700000000)
        with tarfile.open(tmp_path / f"{kind}.tar.gz", "w:gz") as archive_of_source:
            for name in order:
                path = tmp_path / kind / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(held[name])
                path.chmod(0o600 if kind == "first" else 0o777)
                archive_of_source.add(path, name)
        dist.normalise_sdist(tmp_path / f"{kind}.tar.gz", 1700000000)
    for end in ("-clean.whl", ".tar.gz"):
        assert (tmp_path / f"first{end}").read_bytes() == (tmp_path / f"second{end}").read_bytes()
    with zipfile.ZipFile(tmp_path / "first-clean.whl") as archive:
        names = archive.namelist()
        record = archive.read(names[-1]).decode().splitlines()
    assert names == ["a/_C.so", "a/x.py", "a-1.dist-info/METADATA", "a-1.dist-info/RECORD"]
    assert [line.split(",")[0] for line in record] == names and record[1].startswith("a/x.py,sha256=a4ayc_80_OGda4BO")


def test_a_python_without_headers_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"old": (3, 10, 1, True), "new": (3, 12, 1, True), "again": (3, 12, 9, True), "bare": (3, 13, 0, False)}

    def ask(name: str) -> dict[str, object] | None:
        about = known.get(name)
        return about and {"version": list(about[:3]), "is_usual": True, "has_headers": about[3]}

    monkeypatch.setattr(dist, "ask", ask)
    monkeypatch.setattr(dist, "find_pythons", lambda: iter([*known, "a shim that fails"]))
    assert [python.executable for python in dist.choose([])] == ["new"]
    assert capsys.readouterr().out == (
        "Python 3.13.0 (bare) is left out: it has no Python.h (of Debian's python3.13-dev)\n"
    )
    with pytest.raises(SystemExit, match=r"there is no Python 3\.11 or newer with its headers here"):
        dist.choose(["bare", "old"])
    with pytest.raises(SystemExit, match="PYTHONS: nothing is no Python that runs here"):
        dist.choose(["nothing"])


def test_the_licence_of_what_is_compiled_in_is_shipped() -> None:
    (installed,) = (path for path in files("pybind11") or () if path.name == "LICENSE")
    assert (ROOT / "csrc" / "LICENSE.pybind11").read_text() == installed.read_text()


def test_one_version() -> None:
    assert PROJECT["version"] == VERSION
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_no_flag_ties_the_extension_to_the_machine_that_built_it() -> None:
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert not re.findall(r"-m(?:arch|tune|cpu|avx\w*|amx\w*|fma|f16c)\b", text)


def test_every_package_is_checked_and_reaches_the_builds() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    isort = tools["ruff"]["lint"]["isort"]["known-first-party"]
    for listed in (tools["mypy"]["files"], tools["coverage"]["run"]["source"], isort):
        assert set(PACKAGES) <= set(listed)
    assert set(PACKAGES) <= set(find_packages(ROOT, include=["hydra_*"]))
    assert "!hydra_*" in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert 'find_packages(include=["hydra_*"])' in (ROOT / "setup.py").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_import_is_a_dependency() -> None:
    """Checks shipped packages: a dependency is always installed, or with an extra."""
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    named = {re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in lines}
    owners = packages_distributions()
    missing = set()
    for path in [path for package in (*PACKAGES, "kernels/hydra_kernels") for path in (ROOT / package).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for name in {n.split(".")[0] for n in names} - set(sys.stdlib_module_names):
                name = BROUGHT_ALONG.get(name, name)
                found = {owner.lower().replace("_", "-") for owner in owners.get(name, [name])}
                if name not in {*PACKAGES, "hydra_kernels"} and not found & named:
                    missing.add(f"{name} ({path.relative_to(ROOT)})")
    assert not missing
