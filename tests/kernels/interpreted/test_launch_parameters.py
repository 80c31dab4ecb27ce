"""The comparison of bench.micro.launches: each kernel with torch, and a table whose entries change for the time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from bench.micro.launches import Case, Inputs, cases, decodes, entry_of, gated, products, prompts, quantized, table_of
from bench.micro.launches import tower as tower_inputs
from hydra_kernels import linear
from hydra_kernels._launch import Launch

CPU = torch.device("cpu")
MAKERS: dict[str, Callable[[torch.device, int], Inputs]] = {
    "one row": partial(products, 1, 48, 96),
    "few rows": partial(products, 16, 48, 96),
    "gated row": partial(gated, 1, 24, 96),
    "gated rows": partial(gated, 16, 24, 96),
    "4 bits": partial(quantized, 16, 32, 256, 4),
    "8 bits": partial(quantized, 16, 32, 256, 8),
    "decodes": partial(decodes, 2, 4, 2, 16),
    "prompts": partial(prompts, 2, 32, 4, 2, 16),
    "tower": partial(tower_inputs, 2, 16, 50),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Inputs are drawn from torch's own numbers."""
    torch.manual_seed(5)


@pytest.mark.quick("few rows")
@pytest.mark.parametrize("name", MAKERS)
def test_kernels_compute_what_torch_does(name: str) -> None:
    inputs = MAKERS[name](CPU, 1)
    result, expected = inputs.launch(0).float(), inputs.expected.float()
    assert (result - expected).norm() <= 0.02 * expected.norm()


WORDS = (16, 16, 128, 4, 3, 1), (16, 32, 128, 4, 3, 2)
# The table of each, two entries for it, and which constant of the kernel they differ in.
TABLES: dict[str, tuple[str, str, tuple[tuple[int, ...], tuple[int, ...]], str]] = {
    "few rows": ("linear", "small_launch", ((16, 16, 32, 4, 4, 1), (16, 32, 32, 4, 4, 2)), "COLUMNS"),
    "gated rows": ("fused_linear", "pairs_launch", ((16, 8, 32, 4, 4, 1), (16, 16, 32, 4, 4, 1)), "PAIRS"),
    "4 bits": (
        "quantized_linear",
        "few_rows_quantized_launch",
        ((16, 16, 128, 4, 3, 1), (16, 32, 128, 4, 3, 2)),
        "COLUMNS",
    ),
    "decodes": ("decode_attention", "decode_launch", ((16, 16, 4, 2), (16, 32, 4, 2)), "KEYS"),
    "prompts": ("prefill_attention", "prefill_launch", ((16, 16, 4, 2), (32, 32, 4, 2)), "KEYS"),
    "tower": ("packed_attention", "packed_launch", ((16, 16, 4, 2), (32, 32, 4, 2)), "KEYS"),
}


@pytest.mark.quick("few rows", "tower")
@pytest.mark.parametrize("name", TABLES)
def test_the_kernel_of_an_entry_is_launched_and_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are kept: of another entry they are others."""
    module, table, entries, constant = TABLES[name]
    inputs, seen = MAKERS[name](CPU, 1), []
    launch = Launch.__call__

    def watched(self: Launch, *arguments: Any) -> None:
        seen.append(self.constants.get(constant))
        launch(self, *arguments)

    monkeypatch.setattr(Launch, "__call__", watched)
    case = Case(name, f"hydra_kernels.{module}", table, [*entries], MAKERS[name])
    for entry in entries:
        with table_of(case, entry):
            result, expected = inputs.launch(0).float(), inputs.expected.float()
        assert (result - expected).norm() <= 0.02 * expected.norm()
    first, second = (entry[1] for entry in entries)
    assert [value for value in seen if value in (first, second)] == [first, second]


def test_more_rows_are_taken_meanwhile() -> None:
    inputs, before = products(64, 128, 96, CPU, 1), linear.MAX_SMALL_ROWS
    case = Case("rows-64", "hydra_kernels.linear", "small_launch", [], partial(products, 64, 128, 96))
    with table_of(case, (64, 64, 32, 4, 4, 2)):
        result, expected = inputs.launch(0).float(), inputs.expected.float()
    assert (result - expected).norm() <= 0.02 * expected.norm()
    assert before == linear.MAX_SMALL_ROWS
    with pytest.raises(ValueError, match="expected at most 16 rows"):
        inputs.launch(0)


def test_every_case_has_entries_of_its_own_kind() -> None:
    for case in cases().values():
        assert len({*case.entries}) == len(case.entries) > 10, case.name
        assert {type(entry_of(entry)).__name__ for entry in case.entries} == {
            "AttentionLaunch" if len(case.entries[0]) == 4 else "LinearLaunch"
        }
