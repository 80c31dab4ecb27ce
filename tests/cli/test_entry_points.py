"""Entry points of other packages are found in a source tree, which may not be installed, and in installed
distributions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hydra_engine import entry_points
from hydra_engine.cli import commands
from hydra_engine.cli.commands import Command, build_parser, command_of, unknown_command
from hydra_engine.entry_points import load_entry_point, load_entry_points
from tests.cli.conftest import Here

GROUP = "hydra_engine.commands"
SOURCE = "from hydra_engine.cli.commands import Command\nCOMMAND = Command('count sheep', 'sheep_for_hydra.count')\n"
COUNT = "def add_options(parser): parser.add_argument('--sheep', type=int)\ndef run(given): return given.sheep\n"
DECLARED = '[project]\nname = "{}"\n[project.entry-points."hydra_engine.commands"]\nsheep = "sheep_for_hydra:COMMAND"\n'


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages, with one that adds a command; no source tree."""
    package, metadata = tmp_path / "sheep_for_hydra", tmp_path / "sheep_for_hydra-1.0.dist-info"
    for folder in (package, metadata):
        folder.mkdir()
    (package / "__init__.py").write_text(SOURCE)
    (package / "count.py").write_text(COUNT)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sheep-for-hydra\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\nsheep = sheep_for_hydra:COMMAND\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(entry_points, "_PROJECT", tmp_path / "pyproject.toml")
    commands._all.cache_clear()
    yield tmp_path
    commands._all.cache_clear()
    for name in ("sheep_for_hydra", "sheep_for_hydra.count"):
        sys.modules.pop(name, None)


def test_the_packages_beside_the_engine_add_their_commands_to_the_tree() -> None:
    found = load_entry_points(GROUP)
    terminal = ["bench", "chat", "completion", "list", "pull", "run", "run-batch"]
    assert sorted(found) == sorted([*terminal, "memory", "plan", "profile", "quantize", "reproduce"])
    assert all(isinstance(command, Command) for command in found.values())
    assert load_entry_points("hydra_engine.nothing") == {}
    assert load_entry_point(GROUP, "chat") is found["chat"] and load_entry_point(GROUP, "sheep") is None


def test_the_commands_of_other_packages_are_listed_and_run(installed: Path, here: Here) -> None:
    assert command_of("sheep") == "sheep" and "did you mean sheep?" in unknown_command("she")
    assert "  sheep " in here("--help").stdout and "count sheep" in here("--help").stdout
    assert "--sheep" in here("sheep", "--help").stdout
    assert here("sheep", "--sheep", "7").returncode == 7
    assert "--sheep" in build_parser()[1]["sheep"].flags()


@pytest.mark.parametrize(("name", "listed"), [("hydra-engine", True), ("stray", False)])
def test_a_project_file_counts_if_it_is_the_engines(installed: Path, name: str, listed: bool) -> None:
    (installed / "pyproject.toml").write_text(DECLARED.format(name))
    (installed / "sheep_for_hydra-1.0.dist-info" / "entry_points.txt").unlink()
    assert ("sheep" in load_entry_points(GROUP)) == listed


def test_a_command_of_the_engine_is_found_without_looking_for_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(group: str) -> dict[str, Command]:
        raise AssertionError(f"looks for {group}")

    commands._all.cache_clear()
    monkeypatch.setattr(commands, "load_entry_points", load)
    assert command_of("serve") == "serve" and command_of("env") == "doctor"
    assert set(build_parser(only="serve")[1]) > {"serve", "doctor", "env"}
