"""Seconds of a decoder layer's kernels alone, beside the whole layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.micro.layer import _together
from hydra_engine.backend.base import DeferredNorm


@pytest.mark.parametrize(("inside", "seconds"), [(True, 62.0), (False, 61.0)])
def test_a_norm_that_two_parts_have_is_counted_once(inside: bool, seconds: float) -> None:
    x = torch.ones(1, 4)
    result = DeferredNorm(x, torch.ones(4), 1e-5) if inside else x
    layers: Any = SimpleNamespace(add=lambda *_: (result, x), q=x[:, None])
    parts = {"add + norm": 1.0, "qkv": 2.0, "attention": 4.0, "o": 8.0, "gate_up": 16.0, "down": 32.0, "layer": 70.0}
    assert _together(layers, parts) == seconds
