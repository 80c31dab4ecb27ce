"""Model folders with random weights, each made once a campaign."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.common import ROOT

_making = asyncio.Lock()
_folder = tempfile.TemporaryDirectory(prefix="siege-miniatures-")


async def miniature(family: str) -> Path:
    async with _making:
        return await asyncio.to_thread(_made, family)


def _made(family: str) -> Path:
    folder = Path(_folder.name) / family
    if not folder.exists():
        command = [sys.executable, "-m", "tools.miniatures", "--family", family, str(folder)]
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    return folder
