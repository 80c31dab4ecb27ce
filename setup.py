"""Builds `hydra_engine._C` from csrc/. Knows compilers and flags; the package metadata is in pyproject.toml.

The extension is not linked against torch: it takes addresses, sizes and strides as integers, so one build serves every
torch version and needs seconds, not minutes. Instruction-set variants are chosen per function inside the sources,
so the flags below are the same for every x86-64 machine.

Where an nvcc of CUDA 12.5 or newer is found, csrc/cuda is compiled too, with the CUDA runtime linked statically: the
result imports on machines without a driver. Elsewhere csrc/cuda/absent.cpp stands in for it.

HYDRA_CPU_ONLY=1 leaves CUDA out even where a toolkit exists; HYDRA_REQUIRE_CUDA=1 makes it an error that there is none.
HYDRA_CUDA_ARCHS lists what is compiled for: "90" for machine code of that compute capability, "90+ptx" for intermediate
code that newer devices translate; "80;90;90+ptx" unless set. HYDRA_NVCC_FLAGS is added to nvcc's flags, NVCC names it.
HYDRA_BUILD_JOBS sets how many files are compiled at once (as many as there are cores, at most 8, unless set). CXX names
the compiler, LDFLAGS is added where the extension is linked.

`python setup.py build_emulated` makes build/emulated/hydra_engine/_C*.so for tests: the same sources with what is above
AVX2 in C++ (tests/native/emulated), so that every instruction-set level runs on any processor with AVX2.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pybind11
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SOURCES = sorted(
    path.relative_to(ROOT).as_posix() for kind in ("*.cpp", "*.cu") for path in (ROOT / "csrc").rglob(kind)
)
CUDA_SOURCES = ROOT / "csrc" / "cuda"
ABSENT = CUDA_SOURCES / "absent.cpp"
COMPILE_FLAGS = ["-std=c++17", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
# No errno and no trapping from the math functions: both only forbid vectorisation, neither changes a result.
COMPILE_FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
# GCC 12 reports its own AVX-512 headers.
COMPILE_FLAGS += ["-Wno-maybe-uninitialized"]
LINK_FLAGS = ["-shared", "-pthread", "-Wl,--exclude-libs,ALL", "-s"]
# Objects of every Python: only what binds the kernels includes Python.h, and has a folder for each.
OBJECTS = ROOT / "build" / "native"
NEEDS_PYTHON = ("csrc/api/", "csrc/bindings.cpp")
EMULATED = ROOT / "build" / "emulated"
NVCC_FLAGS = ["-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall", "-Xptxas=-v"]
# Without these passes a compilation takes less than half the time; the results are the same.
EMULATOR_FLAGS = ["-DHYDRA_EMULATED", "-Itests/native/emulated", "-Wno-psabi", "-O2", "-fno-tree-pre", "-fno-gcse"]
MIN_CUDA = (12, 5)
DEFAULT_ARCHS = "80;90;90+ptx"


def compiler() -> str:
    name = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), "")
    if not name or not shutil.which(shlex.split(name)[0]):
        raise SystemExit(
            f"hydra-engine: no C++ compiler found ({name or 'g++'}). Install one, for example with "
            "`apt-get install g++` or `dnf install gcc-c++`, or set CXX to its path, then run the same command again."
        )
    return name


@dataclass(frozen=True)
class Toolkit:
    nvcc: list[str]
    root: Path
    runtime: Path  # libcudart_static.a
    archs: tuple[str, ...]  # "80", "90", "90+ptx"

    def gencode(self) -> list[str]:
        flags = []
        for arch in self.archs:
            number = arch.removesuffix("+ptx")
            kind = "compute" if arch.endswith("+ptx") else "sm"
            flags += ["-gencode", f"arch=compute_{number},code={kind}_{number}"]
        return flags

    def codes(self) -> str:
        """Names as the compiler's: "sm_80 sm_90 compute_90"."""
        return " ".join(f"compute_{a.removesuffix('+ptx')}" if a.endswith("+ptx") else f"sm_{a}" for a in self.archs)


def without_cuda(reason: str) -> None:
    """Says why, which is an error where CUDA is asked for."""
    if os.environ.get("HYDRA_REQUIRE_CUDA", "0") not in ("", "0"):
        raise SystemExit(f"hydra-engine: CUDA is left out, but HYDRA_REQUIRE_CUDA asks for it: {reason}")
    print(f"CUDA is left out: {reason}", flush=True)


def static_runtimes(root: Path, major: str) -> list[Path]:
    """Where libcudart_static.a may be: beside nvcc, and in what torch brings for that CUDA (nvidia-cuda-runtime)."""
    folders = [root / folder for folder in ("lib64", "lib", "targets/x86_64-linux/lib")]
    spec = importlib.util.find_spec("nvidia")
    for place in () if spec is None else spec.submodule_search_locations or ():
        folders += sorted(Path(place).glob(f"cu{major}*/lib"))
    return [folder / "libcudart_static.a" for folder in folders]


def toolkit() -> Toolkit | None:
    """The CUDA toolkit to compile with; None, with the reason printed, where there is none to use."""
    if os.environ.get("HYDRA_CPU_ONLY", "0") not in ("", "0"):
        return without_cuda("HYDRA_CPU_ONLY is set")
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    candidates = [os.environ.get("NVCC", "nvcc"), *(f"{home}/bin/nvcc" for home in (*homes, "/usr/local/cuda"))]
    nvcc = next(filter(shutil.which, candidates), None)
    if nvcc is None:
        return without_cuda("no nvcc found")
    # The nvcc on the path may be a script somewhere else: only the program itself knows its root.
    said = subprocess.run(
        [nvcc, "--dryrun", "-c", "x.cu"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stderr
    top = re.search(r"TOP=(\S+)", said)
    version = re.search(r"release (\d+)\.(\d+)", subprocess.check_output([nvcc, "--version"], text=True))
    if top is None or version is None or (int(version[1]), int(version[2])) < MIN_CUDA:
        return without_cuda(f"{nvcc} is older than CUDA {MIN_CUDA[0]}.{MIN_CUDA[1]} or does not answer")
    root = Path(top[1]).resolve()
    runtime = next((path for path in static_runtimes(root, version[1]) if path.exists()), None)
    if runtime is None:
        return without_cuda(f"{nvcc} has no libcudart_static.a beside it, nor has torch's nvidia-cuda-runtime")
    archs = tuple(re.split(r"[;, ]+", os.environ.get("HYDRA_CUDA_ARCHS") or DEFAULT_ARCHS))
    if wrong := [arch for arch in archs if not re.fullmatch(r"\d{2,3}[af]?(\+ptx)?", arch)]:
        raise SystemExit(f"hydra-engine: HYDRA_CUDA_ARCHS: expected values like 90 or 90+ptx, got {wrong[0]!r}")
    return Toolkit([nvcc], root, runtime, archs)


def native_sources(sources: list[str], cuda: Toolkit | None) -> list[str]:
    """Those of `sources` that belong to a build with or without CUDA, device code first: its files take longest."""
    folder = CUDA_SOURCES.relative_to(ROOT).as_posix() + "/"
    absent = ABSENT.relative_to(ROOT).as_posix()
    chosen = [path for path in sources if (path != absent if cuda else path == absent) or not path.startswith(folder)]
    return sorted(chosen, key=lambda path: (not path.endswith(".cu"), path))


def is_stale(target: Path, depfile: Path) -> bool:
    """Whether `target` is missing or older than anything that its last compilation read."""
    if not target.exists() or not depfile.exists():
        return True
    built = target.stat().st_mtime
    inputs = [ROOT / name for name in depfile.read_text().replace("\\\n", " ").split(":", 1)[1].split()]
    inputs.append(Path(__file__))
    return any(not path.exists() or path.stat().st_mtime > built for path in inputs)


class IncrementalBuild(build_ext):
    """Compiles only what changed (headers included), a few files at once, and replaces the library atomically."""

    emulated = False

    def build_extension(self, ext: Extension) -> None:
        self.cxx = shlex.split(compiler())
        self.cuda = None if self.emulated else toolkit()
        self.bindings = OBJECTS / sysconfig.get_config_var("SOABI")
        jobs = int(os.environ.get("HYDRA_BUILD_JOBS") or min(len(os.sched_getaffinity(0)), 8))
        compilations = [self.compilation(source) for source in native_sources(ext.sources, self.cuda)]
        stale = [one for one in compilations if self.force or is_stale(one[1], one[1].with_suffix(".d"))]
        titled = [(f"compiling {number} of {len(stale)}: {one[0]}", *one) for number, one in enumerate(stale, 1)]
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda arguments: compile_one(*arguments), titled))
        compiled = [target for _, target, _ in compilations]
        flags = [*LINK_FLAGS, *shlex.split(os.environ.get("LDFLAGS", ""))]
        # Says what the library is made of: with another choice of CUDA they are other objects, none of them newer.
        manifest = (EMULATED if self.emulated else self.bindings) / "linked"
        parts = "\n".join([*map(str, compiled), *flags])
        if not manifest.exists() or manifest.read_text() != parts:
            manifest.write_text(parts)
        library = Path(self.get_ext_fullpath(ext.name))
        if library.exists() and all(path.stat().st_mtime <= library.stat().st_mtime for path in (*compiled, manifest)):
            return
        library.parent.mkdir(parents=True, exist_ok=True)
        fresh = library.with_suffix(f".{os.getpid()}")
        runtime = [] if self.cuda is None else [str(self.cuda.runtime), "-ldl", "-lrt"]
        subprocess.run([*self.cxx, *map(str, compiled), *runtime, *flags, "-o", str(fresh)], cwd=ROOT, check=True)
        os.replace(fresh, library)

    def compilation(self, source: str) -> tuple[str, Path, list[str]]:
        """Returns `source`, its object and the command that compiles it, without the names of both."""
        folder, command = OBJECTS, [*self.cxx, *COMPILE_FLAGS, "-Icsrc"]
        if self.emulated and source.startswith("csrc/cpu/"):  # the others are as in the extension
            folder, command = EMULATED, [*command, *EMULATOR_FLAGS]
        if self.cuda is not None and CUDA_SOURCES in (ROOT / source).parents:
            folder = folder / self.cuda.codes().replace(" ", "-")
            if source.endswith(".cu"):
                extra = shlex.split(os.environ.get("HYDRA_NVCC_FLAGS", ""))
                command = [*self.cuda.nvcc, *NVCC_FLAGS, *self.cuda.gencode(), *extra, "-Icsrc"]
            else:
                # As a system's: their warnings are not ours.
                codes = self.cuda.codes()
                command += ["-isystem", str(self.cuda.root / "include"), f'-DHYDRA_CUDA_CODE="{codes}"']
        elif source.startswith(NEEDS_PYTHON):
            folder = self.bindings
            # Their names go into assertions, where the folders of this machine would make other bytes of the same code.
            for name, include in (("python", sysconfig.get_paths()["include"]), ("pybind11", pybind11.get_include())):
                command += [f"-I{include}", f"-fmacro-prefix-map={include}={name}"]
        return source, folder / Path(source).with_suffix(".o"), command


def compile_one(title: str, source: str, target: Path, command: list[str]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    started = time.time()  # the object's age: an edit during the compilation makes it stale
    fresh = target.with_suffix(f".{os.getpid()}.o")
    print(title, flush=True)
    outputs = ["-MMD", "-MF", str(target.with_suffix(".d")), "-c", source, "-o", str(fresh)]
    done = subprocess.run([*command, *outputs], cwd=ROOT, capture_output=source.endswith(".cu"), text=True, check=False)
    if done.returncode:
        hint = "; HYDRA_CPU_ONLY=1 builds without CUDA" if source.endswith(".cu") else ""
        raise SystemExit(f"{done.stderr or ''}hydra-engine: {source} does not compile{hint}")
    if source.endswith(".cu"):
        # Registers and spills of every kernel, looked at by tests/native.
        target.with_suffix(".ptxas").write_text(done.stderr)
    os.utime(fresh, (started, started))
    os.replace(fresh, target)


class EmulatedBuild(IncrementalBuild):
    """The library of tests, see above; never part of a wheel."""

    emulated = True

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_lib = str(EMULATED)


setup(
    packages=[*find_packages(include=["hydra_*"]), "hydra_kernels"],
    package_dir={"hydra_kernels": "kernels/hydra_kernels"},
    package_data={
        "": ["*.pyi", "py.typed"],
        "hydra_engine.demo": ["model/*", "pictures/*", "*.json"],
        "hydra_engine.models": ["shapes/*/*"],
        "hydra_planner.hardware": ["*.json"],
        "hydra_engine.server.page": ["static/**/*"],
    },
    ext_modules=[Extension("hydra_engine._C", SOURCES)],
    cmdclass={"build_ext": IncrementalBuild, "build_emulated": EmulatedBuild},
)
