"""The protocol holds in every state of its model, and every safeguard is needed: without it the model goes wrong."""

from __future__ import annotations

import pytest

from tests.transfer.explore import explore
from tests.transfer.model import Model

ONE = {"requests": 1, "parts": 1, "blocks": 1, "attempts": 1, "faults": 1}
PARTS = {"requests": 1, "parts": 2, "blocks": 2, "attempts": 1, "faults": 1}
TWO = {"requests": 2, "parts": 1, "blocks": 1, "attempts": 1, "faults": 0}

IN_ORDER = {"in_order": True}

# Every one of these is explored to its end: each state is looked at.
HOLDS = {
    "a new attempt": ONE | {"attempts": 2},
    "two faults": ONE | {"faults": 2},
    "two parts": PARTS,
    "three parts": PARTS | {"parts": 3, "blocks": 3},
    "two requests for one block": TWO,
    "streams, two requests for one block, a fault": TWO | IN_ORDER | {"faults": 1},
    "streams, two requests of two parts": TWO | IN_ORDER | {"parts": 2, "blocks": 2},
    "streams, two parts, a new attempt": PARTS | IN_ORDER | {"attempts": 2},
    "streams, two parts, two faults": PARTS | IN_ORDER | {"faults": 2},
    "streams without any lease, as long as nothing fails": TWO | IN_ORDER | {"leases": False, "parts": 2, "blocks": 2},
}


# Further combinations of what the others have.
LARGER = {"three parts", "streams, two parts, a new attempt", "streams, two parts, two faults"}


@pytest.mark.drawn
@pytest.mark.quick("two faults", "two requests for one block]")
@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.slow) if what in LARGER else what for what in HOLDS]
)
def test_the_protocol_holds_in_every_state(what: str) -> None:
    outcome = explore(Model(**HOLDS[what]))
    assert not outcome.violation, (outcome.violation, outcome.trace)
    assert outcome.states > 300


# What is switched off, where, and what the first violation is.
MUTANTS = [
    (("no_verify",), TWO, "TORN"),
    (("verify_first",), TWO, "TORN"),
    (("ack_before_copy", "no_verify"), TWO | {"leases": False}, "TORN"),
    (("free_before_gone",), TWO, "TORN"),
    (("reuse_sequence",), TWO, "TORN"),
    (("no_incarnation",), TWO | IN_ORDER | {"faults": 1}, "TORN"),
    (("cut_copy",), TWO | IN_ORDER | {"faults": 1}, "TORN"),
    (("free_early",), TWO | IN_ORDER | {"parts": 2, "blocks": 2}, "TORN"),
    (("commit_early",), PARTS, "TORN"),
    (("unnumbered",), PARTS | {"parts": 3, "blocks": 3}, "TORN"),
    (("ack_lists_blocks",), TWO, "OWNER"),
    (("commit_cancelled",), ONE, "GHOST"),
    (("no_lease",), ONE, "STUCK"),
    (("renew_deaf",), PARTS, "STUCK"),
    (("no_replace",), PARTS | IN_ORDER | {"faults": 2}, "STUCK"),
    (("keep_records",), ONE, "LEAK"),
]


@pytest.mark.quick("no_incarnation")
@pytest.mark.parametrize(
    "mutants,sizes,kind", MUTANTS, ids=lambda value: "+".join(value) if type(value) is tuple else ""
)
def test_every_safeguard_is_needed(mutants: tuple[str, ...], sizes: dict, kind: str) -> None:
    outcome = explore(Model(**sizes, mutants=mutants))
    assert outcome.violation.startswith(kind), outcome
    assert len(outcome.trace) >= 4


@pytest.mark.slow
def test_an_early_acknowledgement_alone_tears_nothing_because_the_word_is_read() -> None:
    """The word's check goes unnoticed without leases and faults: the pair above is what the order protects."""
    assert not explore(Model(**TWO, mutants=("ack_before_copy",))).violation
    assert not explore(Model(**(TWO | {"leases": False}), mutants=("no_verify",))).violation


@pytest.mark.quick("source_ignores_death")
@pytest.mark.parametrize("mutant", ["source_ignores_death", "target_ignores_death"])
def test_watching_for_deaths_only_makes_it_faster(mutant: str) -> None:
    """The lease and the frontend's new attempt cover a death that one side never hears of."""
    assert not explore(Model(**PARTS, mutants=(mutant,))).violation
