"""A real server on the demo model in a process of its own, as `hydra-engine serve` starts it; and commands that run in
this process, which spares each of them the seconds that a start takes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hydra_engine.__main__ import main

ROOT = Path(__file__).parents[2]
KEY = "sesame"


@dataclass(frozen=True)
class Started:
    url: str
    screen: list[str]  # everything it said until it was ready


@dataclass(frozen=True)
class Done:
    """Named as in `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


Here = Callable[..., Done]


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Here:
    """`here("generate", "Hello", ..)`: what the command said."""

    def run(*arguments: str) -> Done:
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
        told = capsys.readouterr()
        return Done(code, told.out, told.err)

    return run


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
