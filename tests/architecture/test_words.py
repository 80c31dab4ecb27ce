"""Words that were given up for the field's own (docs/glossary.md) do not come back as names in the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "hydra_engine", ROOT / "hydra_planner")

# Whole names; prose may use them.
RETIRED = (
    *("Flight", "flights", "Holders", "Suspects", "suspects", "Lending", "lending", "StatusBook", "Place"),
    *("_bury", "_mourn", "corpse", "Dying", "dying", "hear", "excuse", "doomed", "gave_way"),
    *("seat", "seats", "Seats", "DeviceSeats", "SeatPool", "Tenancy", "Recipe", "recipe", "plain_from", "drawn_from"),
    *("Draws", "Commons", "OwnCommons", "Forwarding", "plain_messages", "TokensEvent", "FinishEvent"),
    *("SchedulerStats", "StepLog", "Outside", "Modes", "attainable", "put_back", "Draft", "lend", "Intake"),
    *(
        "RequestBook",
        "ImageBook",
        "check_book",
        "Demand",
        "demand_of",
        "PrefixReuse",
        "TakenBack",
        "is_job",
        "num_named",
    ),
    *("Front", "gives_way", "owe", "owe_all", "Arrival", "hands_over", "images_asked", "HandoverEnd", "DecodeBlocks"),
)


def names_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names of variables, attributes, parameters, definitions and imports, with their lines."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                for word in value.split("."):
                    yield word, getattr(node, "lineno", 0)


def test_retired_names_are_found_wherever_a_name_can_stand() -> None:
    lines = ("import a.seat as b", "from Place import hear", "def corpse(doomed): ...", "seats = x.recipe(Seats=1)")
    words = [word for word, _ in names_in(ast.parse("\n".join(lines)))]
    found = {word for word in words if word in RETIRED}
    assert found == {"seat", "Place", "hear", "corpse", "doomed", "seats", "recipe", "Seats"}


@pytest.mark.slow
def test_retired_names_are_gone() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for package in PACKAGES
        for path in sorted(package.rglob("*.py"))
        for word, line in names_in(ast.parse(path.read_text(encoding="utf-8")))
        if word in RETIRED
    ]
    assert not found, "retired words, see docs/glossary.md: " + ", ".join(found)
