"""docs/transformers-models.md is what the installed transformers gives, and its refusals are sentences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers

from tests.transformers_models import MINIATURES, REFUSED, TEXT_ALONE, Row, line, measured, rows, stored

# Words of Python and of tensors; an end that is none.
POOR = re.compile(
    r"has no attribute|object is not|positional argument|keyword argument|NoneType|Expected input|batch_size|Traceback"
    r"|to unpack|takes no images|\.\.\.?$|[,:;(]$| (a|an|and|the|of|to|in|with|or)$| [A-Z]$|\n"
)


@pytest.fixture(scope="module")
def asked() -> list[Row]:
    return list(rows())


@pytest.mark.slow
def test_the_page_is_what_the_installed_transformers_gives(asked: list[Row]) -> None:
    version, lines = stored()
    if version != transformers.__version__:
        pytest.skip(f"the page is of transformers {version}, installed is {transformers.__version__}")
    for row, found in zip(asked, lines, strict=True):
        if row.type not in MINIATURES:
            assert found == line(row), "run `make support`"
        else:
            runs = REFUSED if MINIATURES[row.type] else row.runs
            assert found.startswith(line(row._replace(runs=runs, sentence="")).split("|  |")[0]), "run `make support`"


@pytest.mark.slow
def test_every_refusal_is_a_sentence(asked: list[Row]) -> None:
    refused = [row for row in asked if row.runs in (REFUSED, TEXT_ALONE)]
    assert len(refused) > 30
    for row in refused:
        assert row.sentence and not POOR.search(row.sentence), f"{row.type}: {row.sentence}"
        assert len(row.sentence) < 300, row


def test_every_miniature_has_its_result_on_the_page() -> None:
    _, lines = stored()
    cells = {found[0].strip("| `"): found[1:] for found in (line.split(" | ") for line in lines)}
    assert set(MINIATURES) <= set(cells)
    for name, (_, runs, why, _, equal, invariant) in cells.items():
        assert "fails" not in equal
        if refusal := MINIATURES.get(name):
            assert runs == REFUSED and re.search(refusal, why) and not POOR.search(why), "run `make support`"
        else:
            assert bool(equal) == (name in MINIATURES), "run `make support`"
            assert bool(invariant.strip("| ")) == (name in MINIATURES), "run `make support`"


def test_a_failed_test_shows_on_the_page(tmp_path: Path) -> None:
    results = tmp_path / "results.xml"
    properties = "".join(
        f'<property name="{name}" value="{value}"/>'
        for name, value in (("type", "aria"), ("equal", "3 of 4"), ("invariant", "no"))
    )
    results.write_text(f"<testsuites><testcase><properties>{properties}</properties><failure/></testcase></testsuites>")
    row = Row("aria", "AriaForConditionalGeneration", "adapter", "", False)
    assert line(row, measured(results)["aria"]).split(" | ")[-2:] == ["fails", "no |"]
