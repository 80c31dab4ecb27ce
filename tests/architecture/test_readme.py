"""README, CONTRIBUTING and SECURITY name make targets, files and folders that exist; the table of models has every
family."""

from __future__ import annotations

import re
from pathlib import Path

from hydra_engine.models.specs.registry import FAMILIES as MODELS
from tests.support_table import BEGIN, DOCUMENT, END, FAMILIES, read, table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    pages = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z][a-z-]+)\b", pages)) - {"tokens"}
    assert named <= targets


def test_every_link_and_path_exists() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"hydra_engine/demo/pictures/[a-z_]+\.png", README):
        assert (ROOT / path).exists(), path


def test_every_file_that_contributing_and_security_name_exists() -> None:
    for name in ("CONTRIBUTING.md", "SECURITY.md"):
        page = (ROOT / name).read_text(encoding="utf-8")
        paths = re.findall(r"`([a-zA-Z_.-]+/[\w./-]*)`", page) + re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page)
        missing = {path for path in paths if "NAME" not in path and not (ROOT / path).exists()}
        assert paths and not missing, missing


def test_the_tree_lists_every_folder() -> None:
    tree = README.split("```\nhydra_engine/\n")[1].split("```")[0]
    listed = set(re.findall(r"^  ([a-z_]+)/", tree, re.MULTILINE))
    folders = {p.name for p in (ROOT / "hydra_engine").iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert listed == folders


def test_the_table_of_models_has_every_family_and_no_failure() -> None:
    native = {name for name, family in MODELS.items() if family.vision}
    assert native <= set(FAMILIES), "a family has no row: add it to tests/support_table.py and run `make support`"
    lines = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip().split("\n")
    assert len(lines) == 2 + len(FAMILIES), "run `make support`"
    rows = dict(zip(FAMILIES, lines[2:], strict=True))
    for family, (name, checkpoints, takes) in FAMILIES.items():
        assert rows[family].startswith(f"| {name} | {checkpoints} | {takes} |"), "run `make support`"
        assert "fails" not in rows[family]
        if family != "text":
            assert all(cell.strip() for cell in rows[family].strip("|").split("|")), f"{name} was not tested in full"


def test_a_failed_test_shows_in_the_table(tmp_path: Path) -> None:
    results = tmp_path / "results.xml"
    cases = [
        ("logits greedy", "3.2e-05", ""),
        ("cuts", "", "<failure/>"),
        ("halves", "", "<skipped/>"),
    ]
    body = "".join(
        f'<testcase><properties><property name="family" value="llava"/><property name="checks" value="{checks}"/>'
        + (f'<property name="difference" value="{difference}"/>' if difference else "")
        + f"</properties>{outcome}</testcase>"
        for checks, difference, outcome in cases
    )
    results.write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>", encoding="utf-8")
    row = table(read(results)).split("\n")[2]
    assert row.split(" | ")[3:] == ["", "3e-5", "✓", "fails", "fails", "", " |"]


def test_the_architecture_page_names_files_and_functions_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_]+/[a-z_/]+\.py)(?::([a-z_]+))?`", page)
    assert len(named) > 30
    for file, function in named:
        path = ROOT / "hydra_engine" / file
        assert path.exists(), file
        assert not function or re.search(rf"def {function}\(", path.read_text(encoding="utf-8")), (file, function)
