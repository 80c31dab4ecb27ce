"""Memory that nobody has written holds NaN and the largest integers, in results and in what kernels hand each other."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    torch.set_deterministic_debug_mode("error")
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(1).isnan()
    yield
    torch.set_deterministic_debug_mode("default")
