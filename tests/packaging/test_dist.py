"""The shipped files: the sdist builds elsewhere, its wheel holds what it must and no more, and runs without the
tree."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import hydra_engine

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OBJECTS = Path("build") / f"native-{sysconfig.get_config_var('SOABI')}"
VERSION = hydra_engine.__version__
# Their owner is a dependency that always has them.
BROUGHT_ALONG = {
    "aiohappyeyeballs": "aiohttp",
    "huggingface_hub": "transformers",
    "tokenizers": "transformers",
    "yarl": "aiohttp",
}

BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
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


def build(tmp_path: Path, *, reuse_objects: bool) -> Path:
    """The wheel of the sdist of this tree, built in a folder of its own."""
    run(sys.executable, "-c", BUILD_SDIST, tmp_path, cwd=ROOT)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / f"hydra_engine-{VERSION}"
    assert not [name for name in ("tests", "bench", "docs", "deploy", "tools", "build") if (source / name).exists()]
    if reuse_objects:
        # Objects are valid by their sources' times, which archives keep.
        shutil.copytree(ROOT / OBJECTS, source / OBJECTS)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps")
    run(*pip, "--wheel-dir", tmp_path / "wheels", source, cwd=tmp_path, HYDRA_CPU_ONLY="1")
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    return wheel


def check_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(f"hydra_engine-{VERSION}.dist-info/METADATA").decode()
    assert f"\nVersion: {VERSION}\n" in metadata and "\nRequires-Python: >=3.11\n" in metadata
    (extension,) = (name for name in held if name.endswith(".so"))
    assert extension == f"hydra_engine/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    tracked = subprocess.run(
        [
            "git",
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            "hydra_engine",
            "hydra_planner",
            "hydra_terminal",
            "hydra_quantizer",
            "hydra_transformers",
            "kernels/hydra_kernels",
        ],
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
@pytest.mark.timeout(600)
def test_a_wheel_of_the_sdist_holds_what_it_must_and_runs(tmp_path: Path) -> None:
    if not (ROOT / OBJECTS).exists():
        pytest.skip("nothing is built here yet (`make build`); the slow test compiles everything")
    wheel = build(tmp_path, reuse_objects=True)
    check_files(wheel)
    check_it_runs(wheel, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # two minutes of two cores, if it has them
def test_the_sdist_has_everything_that_the_compiler_needs(tmp_path: Path) -> None:
    check_files(build(tmp_path, reuse_objects=False))


def test_one_version() -> None:
    assert PROJECT["version"] == VERSION
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_no_flag_ties_the_extension_to_the_machine_that_built_it() -> None:
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert not re.findall(r"-m(?:arch|tune|cpu|avx\w*|amx\w*|fma|f16c)\b", text)


@pytest.mark.slow
def test_every_import_is_a_dependency() -> None:
    """Checks shipped packages: a dependency is always installed, or with an extra."""
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    named = {re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in lines}
    owners = packages_distributions()
    missing = set()
    beside = ("hydra_planner", "hydra_terminal", "hydra_quantizer", "hydra_transformers")
    packages = ("hydra_engine", *beside, "kernels/hydra_kernels")
    for path in [path for package in packages for path in (ROOT / package).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for name in {n.split(".")[0] for n in names} - set(sys.stdlib_module_names):
                name = BROUGHT_ALONG.get(name, name)
                found = {owner.lower().replace("_", "-") for owner in owners.get(name, [name])}
                if name not in {Path(package).name for package in packages} and not found & named:
                    missing.add(f"{name} ({path.relative_to(ROOT)})")
    assert not missing
