"""Model folders from strangers, each opened in a process of its own: refused with a sentence, or harmless."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from bench.common import ROOT
from bench.siege import open_folder
from bench.siege.folders import hostile_folders
from bench.siege.oracles import Finding
from bench.siege.stage import Case, Stage

_making = asyncio.Lock()
_miniatures = tempfile.TemporaryDirectory(prefix="siege-miniatures-")


def _miniature(family: str) -> Path:
    """Made once."""
    folder = Path(_miniatures.name) / family
    if not folder.exists():
        command = [sys.executable, "-m", "tools.miniatures", "--family", family, str(folder)]
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    return folder


async def opened(name: str, _stage: Stage) -> list[Finding]:
    folder = hostile_folders()[name]
    async with _making:
        miniature = await asyncio.to_thread(_miniature, folder.family)
    with tempfile.TemporaryDirectory(prefix="siege-folder-") as place:
        outcome = await asyncio.to_thread(open_folder.opened, folder, miniature, Path(place))
    problem = outcome.problem(folder)
    return [] if problem is None else [Finding("walls" if outcome.canary else "ends", f"{name}: {problem}")]


CASES = [Case("folders", name, partial(opened, name), alone=True) for name in hostile_folders()]
