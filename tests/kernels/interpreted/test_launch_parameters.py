"""What bench.micro.launches compares: each kernel with torch, and a table whose entries are others meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from bench.micro.launches import Case, Inputs, cases, decodes, entry_of, gated, products, prompts, quantized, table_of
from bench.micro.launches import tower as tower_inputs
from hydra_kernels import linear

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


@pytest.mark.parametrize("name", MAKERS)
def test_kernels_compute_what_torch_does(name: str) -> None:
    inputs = MAKERS[name](CPU, 1)
    result, expected = inputs.launch(0).float(), inputs.expected.float()
    assert (result - expected).norm() <= 0.02 * expected.norm()


def test_a_table_has_other_entries_meanwhile_and_takes_more_rows() -> None:
    inputs, before = products(64, 128, 96, CPU, 1), linear.MAX_SMALL_ROWS
    case = Case("rows-64", "hydra_kernels.linear", "small_launch", [], partial(products, 64, 128, 96))
    with table_of(case, (64, 64, 32, 4, 4, 2)):
        assert linear.small_launch(64, 128, 96, torch.bfloat16, 90) == entry_of((64, 64, 32, 4, 4, 2))
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
