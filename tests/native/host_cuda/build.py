"""Compiles the kernels of csrc/cuda for the host, with the real entry points in front of them, under AddressSanitizer
and UndefinedBehaviorSanitizer, into the Python module `host_cuda`.

A .cu file is C++ but for its launches and the parameters of its kernels; `translated` turns both into calls of
executor.h and fails at what it does not know. Whatever else belongs to CUDA alone is missing from include/ and does not
compile. The result is kept in build/host_cuda under a hash of everything that went into it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CSRC = ROOT / "csrc"
KEPT = ROOT / "build" / "host_cuda"
NAME = f"host_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"

FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", "-Werror"]
# Pieces and unrolled loops are CUDA's words. GCC 12 takes values that only some threads load for never loaded.
FLAGS += ["-Wno-unknown-pragmas", "-Wno-maybe-uninitialized"]
SANITIZE = ["-O1", "-g1", "-ffp-contract=off", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]
SANITIZE += ["-fno-sanitize=vptr", "-fno-sanitize-recover=all"]
GLUE = ["-O0", f"-I{sysconfig.get_paths()['include']}", f"-I{pybind11.get_include()}"]
INCLUDES = [f"-I{HERE / 'include'}", f"-I{HERE}", f"-I{CSRC}"]
# device.cpp asks the loader for the driver.
DEVICE = ['-DHYDRA_CUDA_CODE="sm_80 sm_90"', "-Ddlopen=host_cuda_dlopen", "-Ddlclose=host_cuda_dlclose"]

KERNELS = [*sorted((CSRC / "cuda").glob("*.cu")), HERE / "rules.cu"]
SANITIZED = [CSRC / "cuda" / f"{name}.cpp" for name in ("device", "host", "split")]
SANITIZED += [HERE / f"{name}.cpp" for name in ("executor", "runtime", "driver")]
GLUE_SOURCE = HERE / "module.cpp"  # with the entry points

_KERNEL = re.compile(r"__global__ void __launch_bounds__\((\w+)\) (\w+)\(([^()]*)\) \{")
_PARAMETER = re.compile(r"const __grid_constant__ ([\w<>]+) (\w+)")
_LAUNCH = re.compile(r"\b(\w+)(<[\w, ]+>)?<<<([^;]+?)>>>\(([^;]*)\);")


class TranslationError(Exception):
    """A .cu file has a form that the translation does not know."""


def compiler() -> str | None:
    """A C++ compiler with both sanitizers; None where there is none."""
    name = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), "")
    return name if name and shutil.which(shlex.split(name)[0]) else None


def preloads(cxx: str) -> str | None:
    """Libraries that a process must preload to load the module; None if the compiler does not have them as shared
    libraries. The C++ library is one of them: exceptions are looked for when the process starts."""
    names = [f"-print-file-name={name}" for name in ("libasan.so", "libstdc++.so.6")]
    found = [subprocess.check_output([*shlex.split(cxx), name], text=True).strip() for name in names]
    return " ".join(found) if all(map(os.path.isabs, found)) else None


def translated(text: str, name: str) -> str:
    bounds: dict[str, str] = {}

    def kernel(match: re.Match[str]) -> str:
        bound, called, parameters = match.groups()
        references = []
        for parameter in parameters.split(","):
            known = _PARAMETER.fullmatch(parameter.strip())
            if known is None:
                raise TranslationError(
                    f"{name}: {called}: expected `const __grid_constant__ T name`, got {parameter!r}"
                )
            references.append(f"const {known[1]}& {known[2]}")
        bounds[called] = bound
        return f"__global__ void {called}({', '.join(references)}) {{"

    def launch(match: re.Match[str]) -> str:
        called, types, how, arguments = match.groups()
        shape = split_arguments(how)
        if called not in bounds or len(shape) != 4:
            raise TranslationError(f"{name}: expected kernel<<<grid, block, shared, stream>>>, got {match[0]}")
        spelled = called + (types or "")
        return f'::host_cuda::launch({{"{spelled}", {bounds[called]}, {", ".join(shape)}}}, &{spelled}, {arguments});'

    result = _LAUNCH.sub(launch, _KERNEL.sub(kernel, text))
    code = re.sub(r"//[^\n]*", "", result)
    for word in ("<<<", ">>>", "__grid_constant__", "__launch_bounds__"):
        if word in code:
            line = code[: code.index(word)].count("\n") + 1
            raise TranslationError(f"{name}:{line}: {word} in a form that the translation does not know")
    if len(bounds) != code.count("__global__"):
        raise TranslationError(f"{name}: a kernel is declared in a form that the translation does not know")
    return f'#line 1 "{name}"\n{result}'


def split_arguments(text: str) -> list[str]:
    """Splits at commas outside of parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def fingerprint(cxx: str) -> str:
    """Hash of all sources, the compiler and the versions that the build depends on."""
    version = subprocess.check_output([*shlex.split(cxx), "--version"], text=True)
    digest = hashlib.sha256(f"{version}{sys.version}{pybind11.__version__}{ROOT}".encode())
    paths = [Path(__file__)]
    for folder in (CSRC / "api", CSRC / "cuda", CSRC / "cpu" / "cache", CSRC, HERE, HERE / "include"):
        paths += sorted(path for path in folder.iterdir() if path.suffix in (".h", ".cuh", ".cpp", ".cu"))
    for path in paths:
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build(cxx: str) -> Path:
    """The module's path; compiles it unless it is there. Raises subprocess.CalledProcessError with the compiler's words
    already printed."""
    folder = KEPT / fingerprint(cxx)
    folder.mkdir(parents=True, exist_ok=True)
    with (KEPT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        module = folder / NAME
        if not module.exists():
            for other in KEPT.iterdir():
                if other.is_dir() and other != folder:
                    shutil.rmtree(other)
            compile_all(shlex.split(cxx), folder, module)
    return module


def compile_all(cxx: list[str], folder: Path, module: Path) -> None:
    jobs: list[tuple[Path, list[str]]] = [(GLUE_SOURCE, GLUE)]
    for path in KERNELS:
        (folder / f"{path.stem}.cpp").write_text(translated(path.read_text(), str(path.relative_to(ROOT))))
        jobs.append((folder / f"{path.stem}.cpp", SANITIZE))
    jobs += [(path, [*SANITIZE, *(DEVICE if path.name == "device.cpp" else [])]) for path in SANITIZED]

    def compile_one(job: tuple[Path, list[str]]) -> str:
        source, flags = job
        target = folder / f"{source.stem}.o"
        subprocess.run([*cxx, *FLAGS, *flags, *INCLUDES, "-c", str(source), "-o", str(target)], cwd=ROOT, check=True)
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, jobs))
    fresh = folder / "linking"
    link = ["-shared", "-pthread", "-fsanitize=address,undefined", "-o", str(fresh)]
    subprocess.run([*cxx, *objects, *link], cwd=ROOT, check=True)
    fresh.replace(module)
