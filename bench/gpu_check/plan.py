"""The parts of a check, their order and times. The most informative per second come first.

A call has 540 seconds. `planned_s` of its parts add up to less, so each part gets at least that much; what the parts
before it have left over it may use too, up to `limit_s`. bench/NOTES.md has the table. Nothing here is run where a
machine without a GPU could run it as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.gpu_check.commands import (
    LLAVA,
    QWEN,
    TWIN,
    Setup,
    Tests,
    build,
    ceilings,
    files_by_kind,
    run_bench,
    run_tests,
    run_together,
    sanitized,
)
from bench.gpu_check.decide import decisive
from bench.micro.parts import Part
from bench.micro.together import OF_OPERATIONS

BUDGET_S = 540.0
START_S = 14.0  # of the budget, for what comes before the parts
SUMMARY_S = 8.0  # and for what comes after them
DECIDE = "decide"
CALLS = ("first", "second", "full", DECIDE)


def parts_of(call: str, setup: Setup) -> list[Part]:
    """The parts of one of `CALLS`, in order; each begins with a build, which has nothing to do the second time on one
    machine, and has ceilings, which the others read. A first call that has seconds left goes on with the parts of the
    second."""
    if call == DECIDE:
        return decisive(setup)
    if call == "first":
        return [build(setup), *_first(setup), *(replace(part, planned_s=0.0) for part in _second(setup))]
    return [build(setup), ceilings(setup), *(_second(setup) if call == "second" else _full(setup))]


def _first(setup: Setup) -> list[Part]:
    ops, engine, device, _ = files_by_kind()
    return [
        run_tests(setup, Tests("tests-ops", ops, "cuda and not alone", 14, 75.0, 180.0)),
        ceilings(setup),
        *run_together(setup, LLAVA, ("decode", "profile"), LLAVA, 40.0, 140.0),
        run_tests(setup, Tests("tests-engine", [*engine, *device], "cuda and not alone", 10, 60.0, 180.0)),
        run_tests(setup, Tests("tests-device", [*device, *engine, *ops], "cuda and alone", 1, 50.0, 150.0)),
        *sanitized(setup, 45.0, 150.0),
    ]


def _second(setup: Setup) -> list[Part]:
    return [
        *run_together(setup, f"more-{LLAVA}", ("encode", "prefill"), LLAVA, 20.0, 120.0),
        *run_together(setup, QWEN, ("encode", "prefill", "decode", "profile"), QWEN, 40.0, 160.0),
        *run_together(setup, TWIN, ("encode",), TWIN, 20.0, 80.0),
        run_bench(setup, "colocate", LLAVA, 40.0, 150.0),
        run_bench(setup, "colocate", QWEN, 40.0, 150.0),
        *run_together(setup, "operations", OF_OPERATIONS, None, 80.0, 180.0),
        run_bench(setup, "migrate", None, 20.0, 80.0),
        *run_together(setup, f"peers-{LLAVA}", ("decode", "prefill", "encode"), LLAVA, 35.0, 150.0, peers=True),
        *run_together(setup, f"peers-{QWEN}", ("decode", "prefill", "encode"), QWEN, 35.0, 150.0, peers=True),
    ]


def _full(setup: Setup) -> list[Part]:
    """Lists all parts at all sizes. No part reserves time for later ones; parts that the time does not reach are not
    run."""
    full, (*_, instances) = ("--full",), files_by_kind()
    found = [
        run_tests(setup, Tests("tests-instances", instances, "cuda and not alone", 4, 0.0, 150.0)),
        run_tests(setup, Tests("tests-instances-alone", instances, "cuda and alone", 1, 0.0, 360.0)),
        *run_together(
            setup, f"full-{LLAVA}", ("decode", "prefill", "encode"), LLAVA, 0.0, 240.0, flags=full, peers=True
        ),
        *run_together(setup, f"full-{QWEN}", ("decode", "prefill", "encode"), QWEN, 0.0, 240.0, flags=full, peers=True),
        *run_together(setup, f"full-{TWIN}", ("encode",), TWIN, 0.0, 120.0, flags=full, peers=True),
        *run_together(setup, "full-operations", OF_OPERATIONS, None, 0.0, 240.0, flags=full),
    ]
    found += [run_bench(setup, "colocate", model, 0.0, 240.0, mode="full") for model in (LLAVA, QWEN, TWIN)]
    return [*found, run_bench(setup, "migrate", None, 0.0, 120.0, mode="full")]


def chosen(parts: Sequence[Part], only: Sequence[str], skip: Sequence[str]) -> list[Part]:
    """Keeps parts that a word of `only` names and no word of `skip`; a word is a name, the beginning of one, or a
    benchmark. Raises ValueError for a word that names no part."""

    def fits(part: Part, word: str) -> bool:
        return part.name == word or part.name.startswith(f"{word}-") or f"-{word}-" in f"-{part.name}-"

    for word in (*only, *skip):
        if not any(fits(part, word) for part in parts):
            raise ValueError(f"there is no part {word!r}; there are: {', '.join(part.name for part in parts)}")
    kept = [part for part in parts if not only or any(fits(part, word) for word in only)]
    kept = [part for part in kept if not any(fits(part, word) for word in skip)]
    names = {part.name for part in kept}
    kept = [part for part in kept if part.unless is None or part.unless in names]
    # A part that is left out counts as done: the build of an earlier run is good.
    return [part if part.after in names else replace(part, after=None) for part in kept]
