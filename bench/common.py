"""Common parts of the benchmarks: the environment card, interleaved timing, and the result as one JSON document.

Does not know what is measured. Timings on shared machines are noisy, so candidates take turns and the best is reported
beside the median.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Times(NamedTuple):
    """Seconds of one call."""

    median: float
    best: float
    turns: tuple[float, ...] = ()  # each one's, in order


def nvcc_here() -> str | None:
    """The path of nvcc, as the build looks for it."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    candidates = [os.environ.get("NVCC", "nvcc"), *(f"{home}/bin/nvcc" for home in (*homes, "/usr/local/cuda"))]
    return next((path for name in candidates if (path := shutil.which(name))), None)


def card() -> dict[str, Any]:
    """Machine, versions and commit of a measurement."""
    from hydra_engine import _C

    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "isa": _C.isa(),
        "cpu_features": _C.cpu_features(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "commit": commit(),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
    }


def interleaved(
    candidates: dict[str, Callable[[], object]],
    repeats: int = 9,
    min_seconds: float = 0.002,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Times]:
    """Times the candidates in turns, `repeats` rounds; short calls are repeated within a turn up to `min_seconds`.

    For work of one thread `time.thread_time` as the clock leaves out what other processes took of the core.
    """
    calls = {}
    for name, run in candidates.items():
        run()
        started = clock()
        run()
        calls[name] = max(1, int(min_seconds / max(clock() - started, 1e-7)))
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, run in candidates.items():
            started = clock()
            for _ in range(calls[name]):
                run()
            seconds[name].append((clock() - started) / calls[name])
    return {name: Times(median(values), min(values), tuple(values)) for name, values in seconds.items()}


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Writes atomically: if the process is killed, the file has this document or the previous one. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(fresh, path)


def emit(document: dict[str, Any]) -> None:
    """Prints the result as the last line of the output."""
    print(json.dumps(document), flush=True)


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def start_process(command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
    """Starts a process that its caller ends; `options` are Popen's. A SIGTERM that comes meanwhile ends it first: a
    handler that raises in the middle of Popen would leave a process that nobody knows. For the main thread."""
    came: list[int] = []
    handler = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        process = subprocess.Popen(command, **options)
    finally:
        signal.signal(signal.SIGTERM, handler)
    if came:
        process.kill()
        process.wait()
        signal.raise_signal(signal.SIGTERM)
    return process


def commit() -> str | None:
    """The value of BENCH_COMMIT, since a copy of the tree may be in a repository of another commit. Otherwise the short
    commit, with a plus sign if files differ from it; None outside of a repository."""
    if said := os.environ.get("BENCH_COMMIT"):
        return said
    try:
        head = _git("rev-parse", "--short", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
