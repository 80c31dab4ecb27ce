"""The page of the papers' mechanisms: each test that it names exists, and fails without its mechanism."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest

from bench.common import commit
from tools.mutations import ROOT, mutations, rows, survivors


def test_each_mechanism_of_the_page_has_a_test_and_a_mutation() -> None:
    assert [one.mechanism for one in mutations()] == [row.mechanism for row in rows()]
    for row in rows():
        file, name = row.test.split("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), row


def test_each_mutation_changes_the_source_as_it_is(tmp_path: Path) -> None:
    for one in mutations():
        changed = tmp_path / one.file
        changed.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / one.file, changed)
        one.apply(tmp_path)
        compile(changed.read_bytes(), one.file, "exec")


@pytest.mark.slow
def test_tests_fail_without_their_mechanism() -> None:
    """Tries three of them, drawn by the commit."""
    assert survivors(Random(commit()).sample(mutations(), 3)) == []
