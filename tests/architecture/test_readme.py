"""What the README promises exists: make targets, files, folders."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z][a-z-]+)\b", README)) - {"tokens"}
    assert named <= targets


def test_every_link_and_path_exists() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"hydra_engine/demo/pictures/[a-z_]+\.png", README):
        assert (ROOT / path).exists(), path


def test_the_tree_lists_every_room() -> None:
    tree = README.split("## The tree")[1].split("```")[1]
    listed = set(re.findall(r"^  ([a-z_]+)/", tree, re.MULTILINE))
    rooms = {p.name for p in (ROOT / "hydra_engine").iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert listed == rooms
