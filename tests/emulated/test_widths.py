"""Widths of the products that towers and decoders launch on the emulated device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.backend.cuda import linear as cuda_linear
from hydra_engine.backend.cuda.linear import WIDTH_STEP, CudaLinear
from hydra_engine.backend.select import create_backend
from hydra_engine.core.instances import Role
from hydra_engine.models.build import load_model
from hydra_engine.models.layers.vision import VisionInput
from hydra_engine.models.specs.registry import load_spec
from tests.emulated.conftest import Models, assert_clean
from tests.emulated.streams import Streams

Widths = list[tuple[int, int]]  # of x and of the weight that it is multiplied with


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> Widths:
    seen: Widths = []

    def watched(name: str, function: Callable[..., Tensor]) -> None:
        def call(x: Tensor, weight: Tensor | CudaLinear, *rest: object, **options: object) -> Tensor:
            values = weight.weight if isinstance(weight, CudaLinear) else weight
            seen.append((x.shape[1], values.shape[1]))
            return function(x, weight, *rest, **options)

        monkeypatch.setattr(cuda_linear, name, call)

    for name in ("_cublas", "small_linear", "invariant_linear"):
        watched(name, getattr(cuda_linear, name))
    return seen


def encoded(model_dir: Path, backend: Backend) -> tuple[Tensor, list[int]]:
    """Features [tokens, C] of a picture, and numbers of inputs for which rows are padded at each call."""
    spec, on = load_spec(model_dir), backend.device.torch_device
    assert spec.vision is not None
    (item,) = spec.vision.plan_image(56, 84).items
    shape = item.num_pictures, item.height, item.width, 3
    pixels = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)).to(on)
    planes, size = spec.vision.num_planes, spec.vision.feature_size
    cache = PagedCache(torch.zeros(item.num_tokens, planes, 1, 1, 1, size, dtype=backend.dtype, device=on))
    slots = torch.arange(item.num_tokens).to(on)
    model = load_model(model_dir, spec, backend, Role.E)
    with torch.inference_mode():
        model.encode(VisionInput((pixels,), ((56, 84),), (item.grid,), slots), cache)
    weights = [kept for holder in model.holders for kept in holder.packed if isinstance(kept, CudaLinear)]
    return cache.data[:, 0].flatten(1).cpu().float(), [weight.num_in for weight in weights if weight.padding]


@pytest.mark.quick("llava")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_rows_of_a_tower_are_multiples_of_16_bytes(
    streams: Streams, models: Models, multiplied: Widths, family: str, *, deterministic: bool
) -> None:
    """Qwen2.5-VL's inner width and LLaVA's patches are none; nothing is copied for it."""
    model_dir = models(family)
    options = {"threads": 1, "deterministic": deterministic}
    found, padded = encoded(model_dir, create_backend("cuda", torch.bfloat16, **options))
    assert not padded
    assert multiplied and all(wide == deep and wide % WIDTH_STEP == 0 for wide, deep in multiplied)
    expected, _ = encoded(model_dir, create_backend("cpu", torch.float32, threads=1, backend="reference"))
    assert (found - expected).norm() < 0.02 * expected.norm()
    exact, _ = encoded(model_dir, create_backend("cuda", torch.float32, **options))
    torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-4)
    assert_clean(streams)
