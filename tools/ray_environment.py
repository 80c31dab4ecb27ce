"""Makes .ray-venv, Ray and `cryptography` on top of the environment that runs this: `make ray`, and tests with Ray.
Tests with NIXL add that: 70 MB to fetch, 240 on the disk."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".ray-venv"


def make(folder: Path = FOLDER) -> Path:
    """Returns the folder of its programs. What is there already stays. Raises CalledProcessError if Ray cannot be
    installed."""
    programs = folder / "bin"
    if (programs / "ray").exists():
        return programs
    venv.create(folder, symlinks=True)
    paths = [sysconfig.get_path("purelib"), str(ROOT), str(ROOT / "kernels")]
    (packages_in(folder) / "project.pth").write_text("\n".join(paths) + "\n")
    _install(folder, "-c", str(ROOT / "constraints.txt"), "ray==2.60.0", "cryptography>=46")
    return programs


def add_nixl(folder: Path = FOLDER) -> Path:
    """Installs NIXL for CUDA 12, which needs no CUDA to move host memory. Returns the folder of the environment's own
    packages. What is there already stays. Raises CalledProcessError if NIXL cannot be installed."""
    make(folder)
    packages = packages_in(folder)
    if not (packages / "nixl").exists():
        _install(folder, "--no-deps", "nixl-cu12==1.5.1", "nixl==1.5.1")  # it names CUDA 13's too, and torch
    return packages


def packages_in(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))


def _install(folder: Path, *what: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, *what], check=True)


if __name__ == "__main__":
    print(make())
