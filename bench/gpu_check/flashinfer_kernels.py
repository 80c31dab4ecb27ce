"""Compiles kernels of FlashInfer ahead of time, without a GPU or its driver: with the package's own sources and flags,
and CUDA's runtime inside, so that they load wherever tvm-ffi does. Knows no wheels.

The package is asked for its compilers' commands in a process of its own, which needs torch and what
flashinfer_wheel.py names. FLASHINFER_CUDA_ARCH_LIST says for which GPUs ("9.0a", the H100's and H200's, unless set),
NVCC and CUDA_HOME which toolkit, HYDRA_BUILD_JOBS how many files are compiled at once.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from bench.common import nvcc_here

ARCHS, DEFAULT_ARCHS = "FLASHINFER_CUDA_ARCH_LIST", "9.0a"
_FLAGS = "FLASHINFER_EXTRA_CUDAFLAGS"
# Decodes with one or two query heads for each KV head take "decode", all others and prompts "fa2", prompts on Hopper
# "fa3" if it is there. CPU seconds of one on a core: decode 45, fa2 190, fa3 about 1,200.
KINDS = ("decode", "fa2", "fa3")
HEAD_DIMS = (64, 128, 256)
DEFAULT = ("decode-128", "fa2-128")

_COMMANDS = """
import json, sys, torch
from flashinfer.jit.attention import modules
bf16, found = torch.bfloat16, []
for kernel in sys.argv[1:]:
    kind, dim = kernel.split("-")
    given = (bf16, bf16, bf16, torch.int32, int(dim), int(dim), 0, False, False)
    if kind == "decode":
        spec = modules.gen_batch_decode_module(*given)
    elif kind == "fa2":  # keys and values of equal strides, as those of a cache of one tensor
        spec = modules._gen_batch_prefill_primary_module("fa2", *given, False)
    else:
        spec = modules.gen_batch_prefill_module("fa3", *given, False)
    spec.build_dir.mkdir(parents=True)
    found.append((spec.name, [entry["command"] for entry in spec.get_compile_commands()]))
print(json.dumps(found))
"""


class Toolkit(NamedTuple):
    root: Path
    version: str
    runtime: Path  # libcudart_static.a


def toolkit() -> Toolkit | None:
    nvcc = nvcc_here()
    if nvcc is None:
        return None
    # The nvcc on the path may be a script somewhere else: only the program itself knows its root.
    said = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True, check=False).stderr
    top, version = re.search(r"TOP=(\S+)", said), re.search(r"release ([\d.]+)", _said(nvcc, "--version"))
    if top is None or version is None:
        return None
    root = Path(top[1]).resolve()
    found = (root / folder / "libcudart_static.a" for folder in ("lib64", "lib", "targets/x86_64-linux/lib"))
    runtime = next((path for path in found if path.exists()), None)
    return None if runtime is None else Toolkit(root, version[1], runtime)


def checked(kernels: Sequence[str]) -> list[str]:
    """SystemExit names one that there is not."""
    known = [f"{kind}-{dim}" for kind in KINDS for dim in HEAD_DIMS]
    if wrong := [kernel for kernel in kernels if kernel not in known]:
        raise SystemExit(f"FlashInfer has no kernels {wrong[0]!r} for the engine; there are {', '.join(known)}")
    return [*dict.fromkeys(kernels)]


def headers(kernels: Sequence[str], cuda: Toolkit) -> list[str]:
    """Distributions with headers that the toolkit lacks: FA3's sources include cuRAND's."""
    needed = any(kernel.startswith("fa3") for kernel in kernels)
    return ["nvidia-curand"] if needed and not (cuda.root / "include" / "curand_kernel.h").exists() else []


def compiled(folder: Path, kernel: str, cuda: Toolkit) -> Path | None:
    """The module that `build` made in an earlier call, under FlashInfer's name of it."""
    return next(_place(folder, kernel, cuda).glob("*.so"), None)


def build(package: Path, site: Path, kernels: Sequence[str], cuda: Toolkit, folder: Path) -> None:
    """Compiles modules of `kernels` for bfloat16 into `folder`. `package`: an unpacked wheel, whole; `site`: a folder
    with what its import needs and this Python lacks."""
    with TemporaryDirectory(prefix="flashinfer-") as work:
        jobs = int(os.environ.get("HYDRA_BUILD_JOBS") or min(len(os.sched_getaffinity(0)), 8))
        commands = _commands(package, site, kernels, cuda, Path(work))
        with ThreadPoolExecutor(jobs) as pool:
            for kernel, (name, lines) in zip(kernels, commands, strict=True):
                began = time.monotonic()
                print(f"compiling FlashInfer's {kernel}, {len(lines)} files", flush=True)
                objects = [*pool.map(_compiled, lines)]
                module = _place(folder, kernel, cuda) / f"{name}.so"
                module.parent.mkdir(parents=True, exist_ok=True)
                fresh = module.with_suffix(".fresh")
                runtime = (str(cuda.runtime), "-ldl", "-lrt", "-lpthread", "-Wl,--exclude-libs,ALL", "-s")
                _run([os.environ.get("CXX", "c++"), "-shared", *objects, *runtime, "-o", str(fresh)])
                fresh.replace(module)
                print(f"  {time.monotonic() - began:.0f} s, {module.stat().st_size / 2**20:.2f} MiB", flush=True)


def _place(folder: Path, kernel: str, cuda: Toolkit) -> Path:
    archs = os.environ.get(ARCHS, DEFAULT_ARCHS).replace(" ", "-")
    return folder / f"{kernel}-sm{archs}-cuda{cuda.version}"


def _commands(
    package: Path, site: Path, kernels: Sequence[str], cuda: Toolkit, work: Path
) -> list[tuple[str, list[str]]]:
    """The name of each kernel's module and the commands that compile its files."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLASHINFER_DISABLE")}
    flags = (environment.get(_FLAGS, ""), *(f"-I{path}" for path in sorted(site.glob("nvidia/cu*/include"))))
    environment |= {
        "PYTHONPATH": os.pathsep.join((str(package), str(site))),
        "CUDA_HOME": str(cuda.root),
        ARCHS: os.environ.get(ARCHS, DEFAULT_ARCHS),
        _FLAGS: " ".join(filter(None, flags)),
        "FLASHINFER_WORKSPACE_BASE": str(work),
    }
    asked = (sys.executable, "-c", _COMMANDS, *kernels)
    done = subprocess.run(asked, env=environment, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"FlashInfer names no commands for its kernels: {_last(done.stderr)}")
    found: list[tuple[str, list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _compiled(command: str) -> str:
    words = shlex.split(command)
    _run(words)
    return words[words.index("-o") + 1]


def _run(words: Sequence[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stderr.strip()}\nFlashInfer's kernels do not compile: {' '.join(words)[:200]}")


def _said(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]
