"""Negative controls: a guard is taken out by a patch in a copy of the tree, and the case that it names must fail there.

The first line of a patch is `# case: GROUP` or `# case: GROUP/CASE`. Nothing in the package can be turned off.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.common import ROOT
from tests.campaigns.siege.stage import draw

FOLDER = Path(__file__).parent / "controls"
_PACKAGES = (path.parent.name for path in ROOT.glob("hydra_*/__init__.py"))
_COPIED = (*_PACKAGES, "bench", "tools", "tests")
_IGNORED = shutil.ignore_patterns("__pycache__", "*.so", "results", ".mypy_cache")
_PREFIX = "# case: "


class ControlError(Exception):
    """A control that cannot be run."""


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.patch"))


def find(name: str, seed: str) -> str:
    """`drawn`: one by the seed. Raises ControlError."""
    known = names()
    if name == "drawn" and known:
        return draw(seed, known)
    if name not in known:
        raise ControlError(f"there is no control {name!r}; there are {', '.join(known) or 'none'}")
    return name


def case_of(name: str) -> str:
    """Raises ControlError."""
    first = (FOLDER / f"{name}.patch").read_text(encoding="utf-8").partition("\n")[0]
    if not first.startswith(_PREFIX):
        raise ControlError(f"{name}.patch does not begin with {_PREFIX!r}")
    return first.removeprefix(_PREFIX).strip()


def apply(name: str, root: Path, *, check: bool = False) -> None:
    """Applies the patch, with `check` only tries whether it can be. Raises ControlError."""
    command = ["git", "apply", *["--check"] * check, str(FOLDER / f"{name}.patch")]
    environment = dict(os.environ, GIT_CEILING_DIRECTORIES=str(root.parent))
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ControlError(f"{name}.patch does not apply: {done.stderr.strip()}")


def run(name: str, arguments: Sequence[str]) -> int:
    """The exit code of the campaign's case in a copy without the guard. Raises ControlError."""
    with TemporaryDirectory(prefix="siege-control-") as folder:
        root = Path(folder)
        copy(root)
        apply(name, root)
        command = [sys.executable, "-m", "tests.campaigns.siege", "--case", case_of(name), *arguments]
        environment = dict(os.environ, PYTHONPATH=str(root))
        return subprocess.run(command, cwd=root, env=environment, check=False).returncode


def copy(root: Path) -> None:
    for name in _COPIED:
        shutil.copytree(ROOT / name, root / name, ignore=_IGNORED)
    for extension in (ROOT / "hydra_engine").glob("*.so"):
        (root / "hydra_engine" / extension.name).symlink_to(extension.resolve())
