"""Makes .venv with everything that runs hydra-engine (`python3 bootstrap.py`), or also tests it (`.. --dev`).

What `make` calls, with the standard library alone. Names of packages are those of pyproject.toml, versions those of
constraints.txt. Every step is one line with what it fetched and how long it took; the extension is compiled while
packages are fetched, and a terminal shows how many of its files are. A second run does what is missing. Does not know
how the extension is compiled: setup.py does.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CONSTRAINTS = ROOT / "constraints.txt"
STEPS = 4
# Where torch's own builds for processors are. The one on PyPI brings gigabytes of GPU libraries.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Pip ends its lines with these: "Downloading numpy-2.4.6-..whl (16.2 MB)", "Using cached ..".
_SIZE = re.compile(r"^\s*(?:Downloading|Using cached) .*\(([\d.]+) ?(bytes|kB|MB|GB)\)$")
_FILE = re.compile(r"^\s*Processing (/.*\.whl)")
_UNITS = {"bytes": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dev", action="store_true", help="with what tests, checks and measures it")
    dev: bool = parser.parse_args().dev
    if wanting := missing():
        sys.exit(
            f"hydra-engine: there is no {' and no '.join(wanting)} here. Install what is missing, for example with "
            f"`apt-get install {' '.join(wanting.values())}`, then run the same command again."
        )
    os.chdir(ROOT)
    step = Step(1, f"environment  .venv, Python {sys.version.split()[0]}")
    if not PYTHON.exists():
        call(sys.executable, "-m", "venv", str(VENV))
    pip("setuptools", "pybind11")
    step.done()
    # Without a driver nothing compiled for a GPU could run. The tests look at it all the same.
    environment = dict(os.environ)
    if not dev and not has_driver():
        environment.setdefault("HYDRA_CPU_ONLY", "1")
    with tempfile.TemporaryFile("w+") as log:
        command = [str(PYTHON), "setup.py", "--quiet", "build_ext", "--inplace"]
        building = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            install(dev)
            step = Step(4, compilation(dev))
            failed = step.follow(building, log.fileno())
        finally:
            building.kill()
        if failed:
            log.seek(0)
            sys.exit("\n" + log.read())
    call(*PIP, "install", "--no-deps", "--no-build-isolation", "--editable", ".", env=environment)
    step.done()
    print('Its command is .venv/bin/hydra-engine; for the name alone: export PATH="$PWD/.venv/bin:$PATH"', flush=True)


def compilation(dev: bool) -> str:
    compilers = "C++, and CUDA if there is a toolkit" if dev else "C++"
    how_long = "" if any(ROOT.glob("hydra_engine/_C*.so")) else "; 3 to 5 minutes on two cores"
    return f"extension    {compilers}{how_long}"


def missing() -> dict[str, str]:
    """What a build needs and this machine lacks -> the package of Debian and Ubuntu that has it."""
    found = {}
    compiler = os.environ.get("CXX") or "g++"
    if not any(shutil.which(name) for name in (shlex.split(compiler)[0], "g++", "clang++", "c++")):
        found["C++ compiler"] = "g++"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        found["Python.h"] = "python3-dev"
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        found["venv of Python"] = "python3-venv"
    return found


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def install(dev: bool) -> None:
    version = pinned("torch")
    step = Step(2, f"torch        {version}" + ("" if has_driver() else ", CPU"))
    if has_driver():
        fetched = pip(f"torch=={version}")
    else:
        try:
            fetched = pip(f"torch=={version}+cpu")
        except Failed:
            fetched = pip(f"torch=={version}", "--no-deps", "--index-url", CPU_INDEX)
    step.done(fetched)
    step = Step(3, "packages     " + ("that run and test it" if dev else "that run it"))
    step.done(pip(*requirements(dev)))


def pinned(name: str) -> str:
    found = re.search(rf"^{name}==(\S+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def requirements(dev: bool) -> list[str]:
    import tomllib  # Python 3.11

    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    names: list[str] = document["project"]["dependencies"]
    if dev:
        groups = document["dependency-groups"]
        names = names + groups["dist"] + [name for name in groups["dev"] if isinstance(name, str)]
        extras = document["project"]["optional-dependencies"]
        # A GPU's libraries are gigabytes that no test here can use. Pictures here go through processors without
        # torchvision, as in an installation without extras; Ray and NIXL have an environment of their own.
        names += [name for extra in extras.keys() - {"cuda", "processors", "ray", "nixl"} for name in extras[extra]]
    return names


class Step:
    """One line: what it is at once, what came of it at its end."""

    def __init__(self, number: int, title: str) -> None:
        self._start = time.monotonic()
        self._line = f"{number}/{STEPS} {title}"
        print(self._line, end="", flush=True)

    def follow(self, building: subprocess.Popen[bytes], log: int) -> int:
        """Returns the exit status of `building`; until then a terminal shows how many files it is at, from its log."""
        while building.poll() is None:
            # Not by reading on: the place in the file is the one where `building` writes.
            counts = re.findall(rb"^compiling (\d+ of \d+): ", os.pread(log, 1 << 20, 0), re.MULTILINE)
            if counts and sys.stdout.isatty():
                tail = f"; {counts[-1].decode()} files"
                shown = self._line[: shutil.get_terminal_size().columns - len(tail) - 1] + tail
                print(f"\r\x1b[K{shown}", end="", flush=True)
            time.sleep(0.1)
        if sys.stdout.isatty():
            print(f"\r\x1b[K{self._line}", end="", flush=True)
        return building.returncode

    def done(self, fetched: Fetched | None = None) -> None:
        what = f"; {fetched}" if fetched is not None else ""
        print(f"{what}; {time.monotonic() - self._start:.0f} s", flush=True)


class Fetched:
    def __init__(self, output: str) -> None:
        lines = output.splitlines()
        self.megabytes = sum(float(m[1]) * _UNITS[m[2]] for line in lines if (m := _SIZE.match(line)))
        self.megabytes += sum(os.path.getsize(m[1]) / 1e6 for line in lines if (m := _FILE.match(line)))
        installed = [line for line in lines if line.startswith("Successfully installed ")]
        self.packages = sum(len(line.split()) - 2 for line in installed)

    def __str__(self) -> str:
        if not self.packages:
            return "is there"
        return f"{self.packages} package{'s' * (self.packages > 1)}, {self.megabytes:.0f} MB"


class Failed(Exception):
    """A command and what it said."""


# What is imported is compiled when it is; all of it at once would take half a minute.
PIP = (str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", "--no-color")


def pip(*arguments: str) -> Fetched:
    constraints = ("--constraint", str(CONSTRAINTS))
    command = [*PIP, "install", "--no-compile", "--progress-bar", "off", *constraints, *arguments]
    return Fetched(call(*command))


def call(*command: str, env: dict[str, str] | None = None) -> str:
    """What it printed. Its warnings are shown if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise Failed(f"{shlex.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    try:
        main()
    except Failed as error:
        sys.exit(f"\nhydra-engine: this did not work: {error}")
