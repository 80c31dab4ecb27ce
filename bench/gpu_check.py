"""Everything that only a machine with a GPU can say: builds the extension, runs the tests, measures. `make gpu-check`.

Takes the source tree as it is and the Python that runs it: no network, no virtual environment, nothing installed. The
build, the tests and each benchmark are parts of their own (`bench/micro/parts.py`): one that fails or hangs takes
nothing from the others, and all of them together end within `--budget` seconds. The first lines say what this machine
has and which packages are missing; parts that need one of those are not run. The folder gets every part's output, one
JSON document per benchmark, summary.md and check.json. The last line says what failed; the exit status is 0 only if
nothing did, a GPU was there, and the build and all tests ran.

Knows what is run in which order and for how long; not how anything is tested or measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import ROOT
from bench.micro.goals import BENCHES
from bench.micro.parts import Part, Runner, missing
from bench.summary import table

BUDGET_S = 540.0
_SUMMARY_S = 8.0  # of the budget, for what comes after the parts
# One decoder with a KV head for each query head and one with few. The decoder of the third is the second's.
_SHAPES = ("llava-1.5-7b", "qwen2.5-vl-7b")
_TWIN = "qwen2-vl-7b"
_BY_SHAPE = ("decode", "prefill", "encode", "colocate")
_ON_DEVICE = (*_BY_SHAPE, "ceilings", "attn_decode", "cache_write", "quantized", "migrate")
_WORKERS = 8  # processes that share the device in tests that allow it: most of their time is compiling

# Modules -> what goes without them. torch, numpy and pybind11 are needed by everything.
PACKAGES = {
    "torch": "everything",
    "numpy": "everything",
    "pybind11": "the build",
    "setuptools": "the build",
    "pytest": "the tests",
    "hypothesis": "the tests",
    "triton": "the kernels of kernels/",
    "transformers": "models, and what they are compared with",
    "safetensors": "models",
    "tokenizers": "models",
    "PIL": "pictures",
    "msgspec": "models, the scheduler, the engine",
    "simplejpeg": "pictures, the engine",
    "aiohttp": "the engine",
    "prometheus_client": "the engine",
    "tqdm": "the engine",
    "jinja2": "the engine",
    "yaml": "the command line",
    "llguidance": "grammars (nothing here)",
    "matplotlib": "summary.png",
}
_TORCH = ("torch", "numpy")
_MODELS = (*_TORCH, "msgspec", "transformers", "safetensors", "tokenizers")
_ENGINE = (*_MODELS, "simplejpeg", "aiohttp", "prometheus_client", "tqdm", "jinja2", "PIL")
_NEEDS = {
    "ceilings": _TORCH,
    "attn_decode": (*_TORCH, "msgspec"),
    "cache_write": (*_TORCH, "msgspec"),
    "quantized": (*_TORCH, "msgspec"),
    "migrate": (*_TORCH, "msgspec"),
    "sched": (*_TORCH, "msgspec"),
    "preprocess": _ENGINE,
    "frontend": _ENGINE,
}
# What says most comes first: what the time does not reach is not run.
_FULL = ("ceilings", "decode", "attn_decode", "prefill", "encode", "cache_write", "quantized", "colocate", "migrate")


@dataclass(frozen=True)
class Machine:
    """`problem`: why no kernel can run here, empty where one can. `capability` as nvcc wants it: "90"."""

    problem: str
    gpu: str
    capability: str
    nvcc: str | None

    @property
    def usable(self) -> bool:
        return not self.problem


_LOOK = """
import json, torch
found = torch.cuda.is_available()
card = torch.cuda.get_device_properties(0) if found else None
if found:
    assert (torch.ones(8, device="cuda") + 1).sum().item() == 16
print(json.dumps({"gpu": card.name if card else "", "capability": f"{card.major}{card.minor}" if card else "",
                  "cuda": torch.version.cuda}))
"""


def look() -> Machine:
    """Asks torch in a process of its own: one that hangs over a broken driver ends."""
    toolkits = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    candidates = [os.environ.get("NVCC", "nvcc"), *(f"{home}/bin/nvcc" for home in (*toolkits, "/usr/local/cuda"))]
    nvcc = next((path for name in candidates if (path := shutil.which(name))), None)
    try:
        done = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, timeout=90, check=False)
    except subprocess.TimeoutExpired:
        return Machine("torch does not answer: looking for a GPU took over 90 s", "", "", nvcc)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Machine(f"torch fails: {last[:200]}", "", "", nvcc)
    facts = json.loads(done.stdout.splitlines()[-1])
    problem = "" if facts["gpu"] else f"torch finds no GPU (built for CUDA {facts['cuda']})"
    return Machine(problem, facts["gpu"], facts["capability"], nvcc)


# ---- what is run


def plan(folder: Path, machine: Machine, *, jobs: int) -> list[Part]:
    """All parts, in order. Benchmarks that another machine could run come last."""
    archs = os.environ.get("HYDRA_CUDA_ARCHS") or machine.capability
    built = {"HYDRA_CUDA_ARCHS": archs} if archs else {}
    command = (sys.executable, "setup.py", "build_ext", "--inplace")
    build = {"HYDRA_BUILD_JOBS": str(jobs), **built}
    parts = [Part("build", command, 240.0, packages=("pybind11", "setuptools"), environment=build)]
    parts += [_tests(folder, tests, min(jobs, _WORKERS), built) for tests in _TESTS]
    for name in (name for name in BENCHES if name in _ON_DEVICE):
        parts.append(_bench(folder, name, "quick", 150.0, _SHAPES if name in _BY_SHAPE else ()))
    for name in _FULL:
        shapes: Sequence[str] = (*_SHAPES, _TWIN) if name == "encode" else _SHAPES if name in _BY_SHAPE else ("",)
        parts += [_bench(folder, name, "full", 200.0, (shape,) if shape else ()) for shape in shapes]
    parts += [_bench(folder, name, "full", 200.0, (_TWIN,)) for name in _BY_SHAPE if name != "encode"]
    for name in (name for name in BENCHES if name not in _ON_DEVICE):
        parts.append(_bench(folder, name, "quick", 120.0, ()))
    return parts


class Tests(NamedTuple):
    name: str
    limit_s: float
    where: tuple[str, ...]
    side_by_side: bool = False  # in several processes at once


# What a device computes; what needs it for itself; how wide loads are; and that the kernels compile with the Triton
# that is here.
_TESTS = (
    Tests("tests-gpu", 240.0, ("-m", "cuda and not alone", "tests/gpu"), True),
    Tests("tests-device", 150.0, ("-m", "cuda and alone", "tests/gpu")),
    Tests("tests-native", 90.0, ("tests/native",)),
    Tests("tests-compiled", 120.0, ("-m", "not cuda", "tests/kernels/test_compiled.py"), True),
)
_INI = """[pytest]
addopts = -ra --strict-markers --import-mode=importlib -p no:cacheprovider
xfail_strict = true
markers =
    slow: takes more than about ten seconds
    cuda: needs an NVIDIA GPU
    alone: needs the GPU for itself
"""


def _tests(folder: Path, tests: Tests, workers: int, built: Mapping[str, str]) -> Part:
    """With settings of its own: those of pyproject.toml name plugins that may not be here, and turn every warning of
    other versions into an error."""
    name, limit_s, where, side_by_side = tests
    report = f"--junitxml={folder / name}.xml"
    command = (sys.executable, "-m", "pytest", "-q", "-c", str(folder / "pytest.ini"), f"--rootdir={ROOT}", report)
    if not missing(("pytest_timeout",)):
        command += ("--timeout=200", "--timeout-method=thread")  # says where it hung
    environment = {"HYDRA_REQUIRE_CUDA": "1", "HYDRA_STRESS_REQUESTS": "1000", **built}
    if side_by_side and workers > 1 and not missing(("xdist",)):
        command += ("-n", str(workers), "--dist", "worksteal")
        environment |= {"OMP_NUM_THREADS": "2"}  # of each; what tests compare with is computed on the processor
    return Part(name, (*command, *where), limit_s, 15.0, ("torch", "pytest"), "build", environment)


def _bench(folder: Path, name: str, mode: str, limit_s: float, models: Sequence[str]) -> Part:
    title = "-".join((mode, name, *(models if len(models) == 1 else ())))
    command = [sys.executable, "-m", f"bench.micro.{name}", f"--{mode}", "--json", str(folder / f"{title}.json")]
    if models:
        command += ["--model", ",".join(models)]
    return Part(title, tuple(command), limit_s, 10.0, _NEEDS.get(name, _MODELS), "build")


def chosen(parts: Sequence[Part], only: Sequence[str], skip: Sequence[str]) -> list[Part]:
    """Those with one of the words of `only` and none of `skip`; a word is a name or a beginning of one, or a benchmark.
    ValueError names a word that fits nothing."""

    def fits(part: Part, word: str) -> bool:
        return part.name == word or part.name.startswith(f"{word}-") or f"-{word}-" in f"-{part.name}-"

    for word in (*only, *skip):
        if not any(fits(part, word) for part in parts):
            raise ValueError(f"there is no part {word!r}; there are: {', '.join(part.name for part in parts)}")
    kept = [part for part in parts if not only or any(fits(part, word) for word in only)]
    kept = [part for part in kept if not any(fits(part, word) for word in skip)]
    names = {part.name for part in kept}
    # A part that is left out counts as done: the build of an earlier run is good.
    return [part if part.after in names else Part(**{**vars(part), "after": None}) for part in kept]


# ---- the command


def versions() -> str:
    versions = []
    for name in ("torch", "triton", "transformers", "numpy", "setuptools", "pybind11", "pytest"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(versions)


def introduce(machine: Machine) -> list[str]:
    """The first lines: what is here and what is not."""
    absent = missing(list(PACKAGES))
    lines = [
        f"Python {platform.python_version()}, {versions()}; {os.cpu_count()} cores",
        f"GPU: {machine.gpu or 'none: ' + machine.problem}; nvcc: {machine.nvcc or 'none, the extension has no CUDA'}",
        f"packages missing: {len(absent) or 'none'}",
    ]
    return lines + [f"  {name}: without it goes {PACKAGES[name]}" for name in absent]


def check(options: argparse.Namespace) -> int:
    folder: Path = options.dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pytest.ini").write_text(_INI, encoding="utf-8")
    machine = look()
    for line in introduce(machine):
        print(line, flush=True)
    parts = chosen(plan(folder, machine, jobs=options.jobs), options.only, options.skip)
    if not machine.usable:
        parts = [part for part in parts if not _on_device(part.name)]
    for part in parts:  # what is not run again stays, and is in the summary
        (folder / f"{part.name}.json").unlink(missing_ok=True)
    paths = (str(ROOT), str(ROOT / "kernels"), *filter(None, (os.environ.get("PYTHONPATH"),)))
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    runner = Runner(folder, options.budget, reserve_s=_SUMMARY_S)
    try:
        runner.run(parts)
    finally:
        outcomes = list(runner.outcomes.values())
        absent = missing(list(PACKAGES))
        notes = [f"{name} is not installed: without it goes {PACKAGES[name]}" for name in absent]
        notes += [f"{o.name}: {o.state}, {o.seconds:.0f} s. {o.said}" for o in outcomes if o.state != "ok"]
        document: dict[str, Any] = {"machine": asdict(machine), "versions": versions()}
        document |= {"missing": absent, "parts": [asdict(outcome) for outcome in outcomes]}
        (folder / "check.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        for path in table.write(folder, notes):
            print(path, flush=True)
    bad = [o.name for o in outcomes if o.state in ("failed", "out of time")]
    bad += [o.name for o in outcomes if o.state == "not run" and o.name.startswith(("build", "tests"))]
    left = [o.name for o in outcomes if o.state == "not run" and o.name not in bad]
    if not machine.usable:
        bad.insert(0, f"no GPU ({machine.problem})")
    verdict = f"failed: {', '.join(bad)}" if bad else "nothing failed"
    verdict += f"; not run: {', '.join(left)}" if left else ""
    verdict += f"; not installed: {', '.join(absent)}" if absent else ""
    print(f"gpu-check, {runner.elapsed_s:.0f} s: {verdict}")
    return 1 if bad else 0


def _on_device(name: str) -> bool:
    return (
        name in ("tests-gpu", "tests-device")
        or name.startswith("full-")
        or name.removeprefix("quick-").split("-")[0] in _ON_DEVICE
    )


def main(argv: Sequence[str] | None = None) -> int:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=ROOT / "build" / "gpu-check", help="where everything goes")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="of all parts together")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2, help="files compiled at once")
    parser.add_argument("--only", type=words, default=[], help="parts with commas: build,tests,quick,full,ceilings,...")
    parser.add_argument("--skip", type=words, default=[], help="parts to leave out")
    options = parser.parse_args(argv)
    try:
        return check(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
