"""Breaks the mechanisms of docs/mechanisms.md one by one, in a copy of the tree, and runs the test of each, which
has to fail. tests/mutations.toml has the changes.

    python -m tools.mutations
    python -m tools.mutations "test of the link" "parallel encodes of one request"
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tests.examples import THOROUGH

ROOT = Path(__file__).parents[1]
_IGNORED = shutil.ignore_patterns(".git", ".venv", ".ray-venv", "build", "__pycache__", ".*_cache")
_FAILED = 1  # pytest's exit code for tests that failed, not those that could not be collected
_ALL_EXAMPLES = f"--hypothesis-profile={THOROUGH}"
_LONGEST_S = 300.0


class Mutation(msgspec.Struct, forbid_unknown_fields=True):
    """A change of one file that breaks a mechanism: `old`, which is there once, becomes `new`."""

    mechanism: str
    file: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Changes the file below `root`. Raises ValueError if `old` is not there exactly once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.mechanism}: {self.file} has {text.count(self.old)} times {self.old!r}")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


class Row(NamedTuple):
    """A line of the page that names a test."""

    mechanism: str
    test: str  # below tests/
    breaks: str


def rows() -> list[Row]:
    text = (ROOT / "docs" / "mechanisms.md").read_text(encoding="utf-8")
    return [Row(*found) for found in re.findall(r"^\| (.+?) \| .+? \| `(.+?)` \| (.*?) ?\|$", text, re.MULTILINE)]


def mutations() -> list[Mutation]:
    text = (ROOT / "tests" / "mutations.toml").read_text(encoding="utf-8")
    return msgspec.toml.decode(text, type=dict[str, list[Mutation]])["mutation"]


def survivors(chosen: Sequence[Mutation]) -> list[str]:
    """Returns the mechanisms whose test passes without them, with the end of what it printed."""
    tests = {row.mechanism: row.test for row in rows()}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=_IGNORED, symlinks=True)
        for mutation in chosen:
            mutation.apply(copy)
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", _ALL_EXAMPLES]
            ran = subprocess.run(
                [*command, f"tests/{tests[mutation.mechanism]}"],
                cwd=copy,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                timeout=_LONGEST_S,
                check=False,
            )
            shutil.copyfile(ROOT / mutation.file, copy / mutation.file)
            if ran.returncode != _FAILED:
                found.append(f"{mutation.mechanism}: exit code {ran.returncode}\n{ran.stdout[-2000:]}")
            print(f"{mutation.mechanism}: {'fails' if ran.returncode == _FAILED else 'does not fail'}", flush=True)
    return found


def main(names: Sequence[str]) -> int:
    chosen = [one for one in mutations() if not names or one.mechanism in names]
    if unknown := set(names) - {one.mechanism for one in chosen}:
        print(f"no mechanism with a mutation is called {sorted(unknown)[0]!r}", file=sys.stderr)
        return 2
    found = survivors(chosen)
    for one in found:
        print(one, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
