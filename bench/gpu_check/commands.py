"""Commands of the parts of a check: the build, tests of tests/gpu, benchmarks. Does not know which parts a call has."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from bench.common import ROOT
from bench.gpu_check.machine import Machine, sanitizer
from bench.micro.parts import Part, missing

CEILINGS = "quick-ceilings"
# A decoder with a KV head for each query head and one with few; the decoder of the third is the second's.
LLAVA, QWEN, TWIN = "llava-1.5-7b", "qwen2.5-vl-7b", "qwen2-vl-7b"
TEST_S = 60  # the longest that one test may take
_REQUESTS = "300"  # of the test that sends many

_TORCH = ("torch", "numpy")
_OPERATIONS = (*_TORCH, "msgspec")
_MODELS = (*_TORCH, "msgspec", "transformers", "safetensors", "tokenizers")
ENGINE = (*_MODELS, "simplejpeg", "aiohttp", "prometheus_client", "tqdm", "jinja2", "PIL")
_BUILD = ("pybind11", "setuptools")
_TESTS = (*ENGINE, "pytest", "hypothesis", "triton")


class Tests(NamedTuple):
    """Files of tests/gpu. `marks` as pytest's -m, `words` as its -k; `workers`: processes that share the device."""

    name: str
    files: Sequence[str]
    marks: str
    workers: int
    planned_s: float
    limit_s: float
    words: str = ""


@dataclass(frozen=True)
class Setup:
    """The folder that parts write to, and the machine that they are built for."""

    folder: Path
    machine: Machine
    jobs: int

    @property
    def built(self) -> dict[str, str]:
        archs = os.environ.get("HYDRA_CUDA_ARCHS") or self.machine.capability
        return {"HYDRA_CUDA_ARCHS": archs} if archs else {}


# ---- the build


def build(setup: Setup, planned_s: float = 50.0) -> Part:
    """Fails without CUDA, at once."""
    command = (sys.executable, "setup.py", "build_ext", "--inplace")
    environment = {"HYDRA_BUILD_JOBS": str(setup.jobs), "HYDRA_REQUIRE_CUDA": "1", **setup.built}
    return Part("build", command, 200.0, packages=_BUILD, environment=environment, planned_s=planned_s)


# ---- tests


def files_by_kind() -> tuple[list[str], list[str], list[str], list[str]]:
    """The files of tests/gpu: single operations, whole engines, what has to do with streams, parts of the device and
    other processes, and engines of several processes. A file that is none of the last three is the first."""
    files = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    engine = [path for path in files if fnmatch(path, "*/test_engine*")]
    device = [path for path in files if any(fnmatch(path, f"*/test_{kind}*") for kind in ("device", "split", "ipc"))]
    instances = [path for path in files if fnmatch(path, "*/test_instances*")]
    ops = [path for path in files if path not in (*engine, *device, *instances)]
    ops.sort(key=lambda path: "ops" not in path)  # first what has no Triton in it, if it fails the rest is of no use
    return ops, engine, device, instances


INI = """[pytest]
addopts = -ra --strict-markers --import-mode=importlib -p no:cacheprovider
xfail_strict = true
markers =
    slow: takes more than about ten seconds
    quick: the cases that are not slow
    cuda: needs an NVIDIA GPU
    alone: needs the GPU for itself
"""
# Without pytest-benchmark, which some machines have: in several processes each one warns that it measures nothing.
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "bench.gpu_check.outcomes", "-p", "no:benchmark")


def run_tests(setup: Setup, tests: Tests) -> Part:
    """Runs tests with their own settings, since those of pyproject.toml name plugins that may be missing here and turn
    warnings of other versions into errors. A process that ends, or whose test takes too long, is started again: that
    test fails, and the next ones run."""
    folder = setup.folder
    command = (*_PYTEST, "-c", str(folder / "pytest.ini"), f"--rootdir={ROOT}")
    command += (f"--outcomes={folder / tests.name}.jsonl", f"--junitxml={folder / tests.name}.xml")
    if not missing(("pytest_timeout",)):
        command += (f"--timeout={TEST_S}", "--timeout-method=thread")  # ends the process
        command += ("-o", f"faulthandler_timeout={0.9 * TEST_S:.1f}")  # says before where it hangs
    environment = {"HYDRA_REQUIRE_CUDA": "1", "HYDRA_STRESS_REQUESTS": _REQUESTS, **setup.built}
    if not missing(("xdist",)):
        workers = max(1, min(tests.workers, setup.jobs))
        command += ("-n", str(workers), "--dist", "worksteal", "--max-worker-restart", "40")
        threads = max(1, setup.jobs // workers)
        environment |= {"OMP_NUM_THREADS": str(threads)}  # of each; what tests compare with is computed on the host
    return Part(
        tests.name,
        (*command, "-m", tests.marks, *(("-k", tests.words) if tests.words else ()), *tests.files),
        tests.limit_s,
        15.0,
        _TESTS,
        "build",
        environment,
        planned_s=tests.planned_s,
    )


_CAPTURED = "test_captured_calls_repeat"


def sanitized(setup: Setup, planned_s: float, limit_s: float) -> list[Part]:
    """The kernels of csrc/cuda under compute-sanitizer. Each tensor has an allocation of its own, or what is written
    beside one would be another's; so nothing that is captured may allocate. Calls that fail are no errors of a kernel:
    packages of CUDA's look for what a driver has that way."""
    program = sanitizer(setup.machine)
    if program is None:
        return []
    watched = (program, "--tool", "memcheck", "--error-exitcode", "99", "--report-api-errors", "no")
    watched += ("--launch-timeout", "0")  # the part has a limit of its own
    tests = ("-c", str(setup.folder / "pytest.ini"), f"--rootdir={ROOT}", f"--outcomes={setup.folder}/sanitizer.jsonl")
    file = "tests/gpu/test_cache_ops.py"
    command = (*watched, *_PYTEST, *tests, "-m", "cuda", "--deselect", f"{file}::{_CAPTURED}", file)
    environment = {"HYDRA_REQUIRE_CUDA": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", **setup.built}
    return [Part("sanitizer", command, limit_s, 30.0, _TESTS, "build", environment, planned_s=planned_s)]


# ---- benchmarks


def ceilings(setup: Setup, planned_s: float = 15.0) -> Part:
    command = (sys.executable, "-m", "bench.micro.ceilings", "--quick")
    command += ("--json", str(setup.folder / f"{CEILINGS}.json"))
    return Part(CEILINGS, command, 60.0, 10.0, _TORCH, "build", planned_s=planned_s)


def known(setup: Setup) -> tuple[str, str]:
    return "--ceilings", str(setup.folder / f"{CEILINGS}.json")


def run_bench(
    setup: Setup,
    bench: str,
    model: str | None,
    planned_s: float,
    limit_s: float,
    *,
    mode: str = "quick",
    flags: Sequence[str] = (),
    min_s: float = 10.0,
) -> Part:
    name = "-".join(filter(None, ("full" if mode == "full" else "", bench, model)))
    command = (sys.executable, "-m", f"bench.micro.{bench}", f"--{mode}", *known(setup))
    command += ("--json", str(setup.folder / f"{name}.json"), *(("--model", model) if model else ()), *flags)
    needs = ENGINE if bench == "migrate" else _MODELS
    return Part(name, command, limit_s, min_s, needs, "build", planned_s=planned_s)


def run_together(
    setup: Setup,
    name: str,
    benches: Sequence[str],
    model: str | None,
    planned_s: float,
    limit_s: float,
    *,
    flags: Sequence[str] = ("--quick",),
    peers: bool = False,
) -> list[Part]:
    """Runs benchmarks in one process, and those that it has not begun in another one if it breaks."""
    prefix = next((f"{word}-" for word in ("full", "peers") if name.startswith(f"{word}-")), "")
    command: tuple[str, ...] = (sys.executable, "-m", "bench.micro.together", ",".join(benches))
    command += ("--dir", str(setup.folder), "--prefix", prefix, *known(setup), *flags)
    command += (*(("--model", model) if model else ()), *(() if peers else ("--no-peers",)))
    part = Part(name, command, limit_s, 15.0, _MODELS if model else _OPERATIONS, "build", planned_s=planned_s)
    if len(benches) == 1:
        return [part]
    again = replace(part, name=f"{name}-again", command=(*command, "--resume"), planned_s=0.0, unless=name)
    return [part, again]


def run_serve(
    setup: Setup, model: str, rates: str, planned_s: float, limit_s: float, *, configs: Mapping[str, str]
) -> Part:
    """A server of random weights under loads of a few seconds each, and one more for each of `configs`, which are flags
    by name. Every request has a picture, and 128 run at most, so that more arrivals than a server serves fill it within
    three seconds."""
    command: tuple[str, ...] = (
        sys.executable,
        "-m",
        "bench.serve",
        "curve",
        "--model",
        model,
        "--workload",
        "textcaps",
    )
    command += ("--text-share", "0", "--ttft-slo", "1s", "--tpot-slo", "40ms", "--no-server-limits")
    command += ("--server-args", "--load-format random --max-num-seqs 128")
    for name, given in configs.items():
        command += ("--config", f"{name}={given}")
    command += ("--alone", "20", "--rates", rates, "--load-seconds", "7", "--drain", "4", "--bisect", "0")
    name = f"serve-{model}"
    command += ("--output", str(setup.folder / f"{name}.json"))
    return Part(name, command, limit_s, 30.0, ENGINE, "build", planned_s=planned_s)
