"""The networks that tests of blocks run over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forkserver import EXEC_VARIABLE
from tests.nodes import blocks
from tools import ray_environment


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes NIXL importable, here and in processes that are started, behind all packages that are there."""
    try:
        packages = str(ray_environment.add_nixl())
    except subprocess.CalledProcessError:
        pytest.skip("NIXL cannot be installed here")
    monkeypatch.setattr(sys, "path", [*sys.path, packages])
    paths = [str(Path(__file__).parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep), packages]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv(EXEC_VARIABLE, "1")  # what is forked has another path


@pytest.fixture(params=["tcp", pytest.param("nixl", marks=pytest.mark.slow)])
def each_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test over TCP and over NIXL."""
    if request.param == "nixl":
        request.getfixturevalue("nixl")
        monkeypatch.setattr(blocks, "above", blocks.nixl_above)
    return str(request.param)
