"""Makes .ray-venv, Ray and `cryptography` on top of the environment that runs this: `make ray`, and tests with Ray."""

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
    packages = sysconfig.get_path("purelib")
    own = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    Path(own, "project.pth").write_text("\n".join([packages, str(ROOT), str(ROOT / "kernels")]) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--quiet"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), "ray==2.60.0", "cryptography>=46"], check=True)
    return programs


if __name__ == "__main__":
    print(make())
