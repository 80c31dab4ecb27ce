"""Builds `hydra_engine._C` from csrc/. Knows compilers and flags; the package metadata is in pyproject.toml.

The extension is not linked against torch: it takes addresses, sizes and strides as integers, so one build serves every
torch version and needs seconds, not minutes. Instruction-set variants are chosen per function inside the sources,
so the flags below are the same for every x86-64 machine.

HYDRA_CPU_ONLY=1 leaves device sources out even where a CUDA toolkit exists; there are none yet.
HYDRA_BUILD_JOBS sets how many files are compiled at once (2 unless set). CXX names the compiler.
"""

import os
import shlex
import shutil
import subprocess
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SOURCES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.cpp"))
COMPILE_FLAGS = ["-std=c++17", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
# No errno and no trapping from the math functions: both only forbid vectorisation, neither changes a result.
COMPILE_FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
# GCC 12 reports its own AVX-512 headers.
COMPILE_FLAGS += ["-Wno-maybe-uninitialized"]
LINK_FLAGS = ["-shared", "-pthread", "-Wl,--exclude-libs,ALL", "-s"]


def compiler() -> str:
    name = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), "")
    if not name or not shutil.which(shlex.split(name)[0]):
        raise SystemExit(
            f"hydra-engine: no C++ compiler found ({name or 'g++'}). Install one, for example with "
            "`apt-get install g++` or `dnf install gcc-c++`, or set CXX to its path, then run the same command again."
        )
    return name


def is_stale(target: Path, depfile: Path) -> bool:
    """Whether `target` is missing or older than anything that its last compilation read."""
    if not target.exists() or not depfile.exists():
        return True
    built = target.stat().st_mtime
    inputs = [ROOT / name for name in depfile.read_text().replace("\\\n", " ").split()[1:]]
    inputs.append(Path(__file__))
    return any(not path.exists() or path.stat().st_mtime > built for path in inputs)


class IncrementalBuild(build_ext):
    """Compiles only what changed (headers included), a few files at once, and replaces the library atomically."""

    def build_extension(self, ext: Extension) -> None:
        cxx = shlex.split(compiler())
        objects = ROOT / "build" / f"native-{sysconfig.get_config_var('SOABI')}"
        includes = [f"-I{ROOT / 'csrc'}", f"-I{sysconfig.get_paths()['include']}", f"-I{pybind11.get_include()}"]

        def compile_one(source: str) -> Path:
            target = objects / Path(source).with_suffix(".o")
            depfile = target.with_suffix(".d")
            if self.force or is_stale(target, depfile):
                target.parent.mkdir(parents=True, exist_ok=True)
                started = time.time()  # the object's age: an edit during the compilation makes it stale
                fresh = target.with_suffix(f".{os.getpid()}.o")
                outputs = ["-MMD", "-MF", str(depfile), "-c", source, "-o", str(fresh)]
                print(f"compiling {source}", flush=True)
                subprocess.run([*cxx, *COMPILE_FLAGS, *includes, *outputs], cwd=ROOT, check=True)
                os.utime(fresh, (started, started))
                os.replace(fresh, target)
            return target

        with ThreadPoolExecutor(int(os.environ.get("HYDRA_BUILD_JOBS", "2"))) as pool:
            compiled = list(pool.map(compile_one, ext.sources))
        library = Path(self.get_ext_fullpath(ext.name))
        if library.exists() and all(path.stat().st_mtime <= library.stat().st_mtime for path in compiled):
            return
        library.parent.mkdir(parents=True, exist_ok=True)
        fresh = library.with_suffix(f".{os.getpid()}")
        subprocess.run([*cxx, *map(str, compiled), *LINK_FLAGS, "-o", str(fresh)], cwd=ROOT, check=True)
        os.replace(fresh, library)


setup(
    packages=find_packages(include=["hydra_engine", "hydra_engine.*"]),
    package_data={
        "hydra_engine": ["*.pyi", "py.typed"],
        "hydra_engine.demo": ["model/*", "pictures/*", "*.json"],
        "hydra_engine.server": ["static/*"],
    },
    ext_modules=[Extension("hydra_engine._C", SOURCES)],
    cmdclass={"build_ext": IncrementalBuild},
)
