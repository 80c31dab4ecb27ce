"""Model folders from strangers, each opened in a process of its own: refused with a sentence, or harmless."""

from __future__ import annotations

import asyncio
import tempfile
from functools import partial
from pathlib import Path

from tests.campaigns.siege import open_folder
from tests.campaigns.siege.folders import hostile_folders
from tests.campaigns.siege.miniatures import miniature
from tests.campaigns.siege.oracles import Finding
from tests.campaigns.siege.stage import Case, Stage


async def opened(name: str, _stage: Stage) -> list[Finding]:
    folder = hostile_folders()[name]
    model = await miniature(folder.family)
    with tempfile.TemporaryDirectory(prefix="siege-folder-") as place:
        outcome = await asyncio.to_thread(open_folder.opened, folder, model, Path(place))
    problem = outcome.problem(folder)
    return [] if problem is None else [Finding("walls" if outcome.canary else "ends", f"{name}: {problem}")]


CASES = [Case("folders", name, partial(opened, name), alone=True) for name in hostile_folders()]
