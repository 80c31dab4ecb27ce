"""A real server on the demo model in a process of its own, as `hydra-engine serve` starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEY = "sesame"


@dataclass(frozen=True)
class Started:
    url: str
    screen: list[str]  # everything it said until it was ready


@pytest.fixture(scope="session")
def server() -> Iterator[Started]:
    """Asks for the key `KEY`, which it has from its environment."""
    command = [sys.executable, "-m", "hydra_engine", "serve", "demo", "--port", "0", "--threads", "1"]
    environment = {**os.environ, "HYDRA_API_KEY": KEY}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line.rstrip("\n"))
            if line.startswith("ready on "):
                break
        else:
            pytest.fail("\n".join(lines))
        try:
            yield Started(lines[-1].split()[-1], lines)
        finally:
            process.terminate()
            process.stderr.read()
