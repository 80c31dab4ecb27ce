"""Which parts a check has, in which order and for how long. What says most in a second comes first.

A call has 540 seconds. `planned_s` of its parts add up to less, so each part gets at least that much; what the parts
before it have left over it may use too, up to `limit_s`. bench/NOTES.md has the table. Nothing here is run where a
machine without a GPU could run it as well.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from bench.common import ROOT
from bench.gpu_check.machine import Machine, sanitizer
from bench.micro.parts import Part, missing
from bench.micro.together import OF_OPERATIONS

BUDGET_S = 540.0
START_S = 14.0  # of the budget, for what comes before the parts
SUMMARY_S = 8.0  # and for what comes after them
CALLS = ("first", "second", "full")
CEILINGS = "quick-ceilings"
# A decoder with a KV head for each query head and one with few; the decoder of the third is the second's.
LLAVA, QWEN, TWIN = "llava-1.5-7b", "qwen2.5-vl-7b", "qwen2-vl-7b"
TEST_S = 60  # the longest that one test may take
_REQUESTS = "300"  # of the test that sends many

_TORCH = ("torch", "numpy")
_OPERATIONS = (*_TORCH, "msgspec")
_MODELS = (*_TORCH, "msgspec", "transformers", "safetensors", "tokenizers")
_ENGINE = (*_MODELS, "simplejpeg", "aiohttp", "prometheus_client", "tqdm", "jinja2", "PIL")
_BUILD = ("pybind11", "setuptools")
_TESTS = (*_ENGINE, "pytest", "hypothesis", "triton")


class Tests(NamedTuple):
    """Files of tests/gpu. `marks` as pytest's -m; `workers`: processes that share the device."""

    name: str
    files: Sequence[str]
    marks: str
    workers: int
    planned_s: float
    limit_s: float


@dataclass(frozen=True)
class Setup:
    """Where parts write, and what they are built for."""

    folder: Path
    machine: Machine
    jobs: int

    @property
    def built(self) -> dict[str, str]:
        archs = os.environ.get("HYDRA_CUDA_ARCHS") or self.machine.capability
        return {"HYDRA_CUDA_ARCHS": archs} if archs else {}


def parts_of(call: str, setup: Setup) -> list[Part]:
    """Of "first", "second" or "full", in order; each call begins with a build, which has nothing to do the second time
    on one machine, and has ceilings, which the others read. A first call that has seconds left goes on with the parts
    of the second."""
    if call == "first":
        return [_build(setup), *_first(setup), *(replace(part, planned_s=0.0) for part in _second(setup))]
    return [_build(setup), _ceilings(setup), *(_second(setup) if call == "second" else _full(setup))]


def _first(setup: Setup) -> list[Part]:
    ops, engine, device, _ = files_by_kind()
    return [
        _tests(setup, Tests("tests-ops", ops, "cuda and not alone", 14, 75.0, 180.0)),
        _ceilings(setup),
        *_together(setup, LLAVA, ("decode", "profile"), LLAVA, 40.0, 140.0),
        _tests(setup, Tests("tests-engine", [*engine, *device], "cuda and not alone", 10, 60.0, 180.0)),
        _tests(setup, Tests("tests-device", [*device, *engine, *ops], "cuda and alone", 1, 50.0, 150.0)),
        *_sanitized(setup, 45.0, 150.0),
    ]


def _second(setup: Setup) -> list[Part]:
    return [
        *_together(setup, f"more-{LLAVA}", ("encode", "prefill"), LLAVA, 20.0, 120.0),
        *_together(setup, QWEN, ("encode", "prefill", "decode", "profile"), QWEN, 40.0, 160.0),
        *_together(setup, TWIN, ("encode",), TWIN, 20.0, 80.0),
        _bench(setup, "colocate", LLAVA, 40.0, 150.0),
        _bench(setup, "colocate", QWEN, 40.0, 150.0),
        *_together(setup, "operations", OF_OPERATIONS, None, 80.0, 180.0),
        _bench(setup, "migrate", None, 20.0, 80.0),
        *_together(setup, f"peers-{LLAVA}", ("decode", "prefill", "encode"), LLAVA, 35.0, 150.0, peers=True),
        *_together(setup, f"peers-{QWEN}", ("decode", "prefill", "encode"), QWEN, 35.0, 150.0, peers=True),
    ]


def _full(setup: Setup) -> list[Part]:
    """All sizes. No part keeps seconds for those behind it: what the time does not reach is not run."""
    full, (*_, instances) = ("--full",), files_by_kind()
    found = [
        _tests(setup, Tests("tests-instances", instances, "cuda and not alone", 4, 0.0, 150.0)),
        _tests(setup, Tests("tests-instances-alone", instances, "cuda and alone", 1, 0.0, 360.0)),
        *_together(setup, f"full-{LLAVA}", ("decode", "prefill", "encode"), LLAVA, 0.0, 240.0, flags=full, peers=True),
        *_together(setup, f"full-{QWEN}", ("decode", "prefill", "encode"), QWEN, 0.0, 240.0, flags=full, peers=True),
        *_together(setup, f"full-{TWIN}", ("encode",), TWIN, 0.0, 120.0, flags=full, peers=True),
        *_together(setup, "full-operations", OF_OPERATIONS, None, 0.0, 240.0, flags=full),
    ]
    found += [_bench(setup, "colocate", model, 0.0, 240.0, mode="full") for model in (LLAVA, QWEN, TWIN)]
    return [*found, _bench(setup, "migrate", None, 0.0, 120.0, mode="full")]


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
    kept = [part for part in kept if part.unless is None or part.unless in names]
    # A part that is left out counts as done: the build of an earlier run is good.
    return [part if part.after in names else replace(part, after=None) for part in kept]


# ---- the build


def _build(setup: Setup) -> Part:
    """Fails without CUDA, at once."""
    command = (sys.executable, "setup.py", "build_ext", "--inplace")
    environment = {"HYDRA_BUILD_JOBS": str(setup.jobs), "HYDRA_REQUIRE_CUDA": "1", **setup.built}
    return Part("build", command, 200.0, packages=_BUILD, environment=environment, planned_s=50.0)


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


def _tests(setup: Setup, tests: Tests) -> Part:
    """With settings of its own: those of pyproject.toml name plugins that may not be here, and turn every warning of
    other versions into an error. In processes that are started again where a test takes too long or the process ends:
    that test fails, and the next one goes on."""
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
        (*command, "-m", tests.marks, *tests.files),
        tests.limit_s,
        15.0,
        _TESTS,
        "build",
        environment,
        planned_s=tests.planned_s,
    )


_CAPTURED = "test_captured_calls_repeat"


def _sanitized(setup: Setup, planned_s: float, limit_s: float) -> list[Part]:
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


def _ceilings(setup: Setup) -> Part:
    command = (sys.executable, "-m", "bench.micro.ceilings", "--quick")
    command += ("--json", str(setup.folder / f"{CEILINGS}.json"))
    return Part(CEILINGS, command, 60.0, 10.0, _TORCH, "build", planned_s=15.0)


def _known(setup: Setup) -> tuple[str, str]:
    return "--ceilings", str(setup.folder / f"{CEILINGS}.json")


def _bench(
    setup: Setup, bench: str, model: str | None, planned_s: float, limit_s: float, *, mode: str = "quick"
) -> Part:
    name = "-".join(filter(None, ("full" if mode == "full" else "", bench, model)))
    command = (sys.executable, "-m", f"bench.micro.{bench}", f"--{mode}", *_known(setup))
    command += ("--json", str(setup.folder / f"{name}.json"), *(("--model", model) if model else ()))
    needs = _ENGINE if bench == "migrate" else _MODELS
    return Part(name, command, limit_s, 10.0, needs, "build", planned_s=planned_s)


def _together(
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
    """One process for all, and another one for those that it has not begun, should it break."""
    prefix = next((f"{word}-" for word in ("full", "peers") if name.startswith(f"{word}-")), "")
    command: tuple[str, ...] = (sys.executable, "-m", "bench.micro.together", ",".join(benches))
    command += ("--dir", str(setup.folder), "--prefix", prefix, *_known(setup), *flags)
    command += (*(("--model", model) if model else ()), *(() if peers else ("--no-peers",)))
    part = Part(name, command, limit_s, 15.0, _MODELS if model else _OPERATIONS, "build", planned_s=planned_s)
    if len(benches) == 1:
        return [part]
    again = replace(part, name=f"{name}-again", command=(*command, "--resume"), planned_s=0.0, unless=name)
    return [part, again]
