"""Launches of the CUDA backend's ops on the emulated device."""

from __future__ import annotations

import pytest
import torch

from hydra_engine.backend.base import PagedCache, Routes
from hydra_engine.backend.cuda.cache import CudaCacheOps
from hydra_engine.backend.quantized import quantized
from hydra_engine.backend.select import create_backend
from hydra_engine.models.loading.quantize import quantize_in_torch, quantized_matrix
from tests.emulated.streams import Streams
from tests.emulated.tensors import DEVICE
from tests.emulated.works import Work


@pytest.fixture
def launches(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    seen: list[Work] = []
    monkeypatch.setattr(streams, "launch", seen.append)
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("options", "expected"), [({}, 1), ({"act": "silu"}, 2), ({"out_dtype": torch.float16}, 2)])
def test_logits_of_many_rows_are_one_launch(
    launches: list[Work], dtype: torch.dtype, options: dict[str, object], expected: int
) -> None:
    """A product by cuBLAS gives sums, and nothing copies them where nothing is done with them."""
    ops = create_backend("cuda", dtype, threads=1).ops
    x = torch.randn((17, 32), device=DEVICE).to(dtype)
    values = torch.randn((48, 32), device=DEVICE).to(dtype)
    weight = ops.pack_linear(values)
    wide = x.float() @ values.float().T
    wide = torch.nn.functional.silu(wide) if options.get("act") else wide
    launches.clear()
    out = ops.linear(x, weight, **({"out_dtype": torch.float32} | options))  # type: ignore[arg-type]
    assert len(launches) == expected and out.dtype is options.get("out_dtype", torch.float32)
    torch.testing.assert_close(out.float().cpu(), wide.cpu(), rtol=2e-3, atol=2e-3)


@pytest.mark.usefixtures("streams")
def test_kernels_on_a_cache_in_host_memory_are_refused() -> None:
    """The error says what to change, before torch says that such memory has no stream."""
    cache, other = (PagedCache(torch.zeros(2, 1, 2, 4, 1, 8)) for _ in range(2))
    features = PagedCache(torch.zeros(2, 1, 1, 4, 1, 8))
    ops, slots, row = CudaCacheOps(), torch.tensor([0]), torch.zeros(1, 1, 8)
    angles = torch.zeros(1, 4), torch.zeros(1, 4)
    for call in (
        lambda: ops.write_cache(cache, 0, [row, row], slots),
        lambda: ops.rope_and_write(row, row, row, angles, cache, 0, slots),
        lambda: ops.merge_image_tokens(row[0], slots, features, slots),
        lambda: ops.gather_cache(cache, 0, 1, slots),
        lambda: ops.copy_blocks(cache, other, torch.tensor([[0, 1]])),
    ):
        with pytest.raises(
            ValueError, match="cache: expected one on a GPU, got one on cpu; allocate it there, or take"
        ):
            call()


@pytest.mark.parametrize("form", ["float", "int4"])
def test_experts_are_captured_and_follow_the_routes_of_each_replay(streams: Streams, form: str) -> None:
    backend = create_backend("cuda", torch.bfloat16, threads=1)
    shapes = (64, 64), (64, 32)
    plain = [[(torch.randn(shape) / 8).bfloat16() for _ in range(5)] for shape in shapes]
    given = [
        [weight if form == "float" else quantized(weight, 4, 32, torch.float16) for weight in part] for part in plain
    ]
    packed = backend.ops.pack_experts(*([weight.to(DEVICE) for weight in part] for part in given))
    x, logits, gate = (torch.zeros((6, n), device=DEVICE, dtype=torch.bfloat16) for n in (64, 4, 1))
    results: list[torch.Tensor] = []

    def step() -> list[torch.Tensor]:
        routes = backend.ops.route(logits, 2, renormalise=True, shared=gate)
        return [*routes, backend.ops.experts(x, routes, packed, "silu")]

    def launch() -> None:
        results[:] = step()

    graph = backend.device.capture(launch)
    for _ in range(2):
        for tensor in (x, logits, gate):
            tensor.copy_(torch.randn(tensor.shape).bfloat16())
        graph.replay()
        assert all(torch.equal(found.cpu(), expected.cpu()) for found, expected in zip(results, step(), strict=True))
        assert results[-1].cpu().any()
    assert not streams.findings


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_first_use_of_experts_launches_what_later_steps_do(launches: list[Work], *, deterministic: bool) -> None:
    """Few and many rows have kernels of their own, which a warm-up of few rows has to compile too."""
    ops = create_backend("cuda", torch.bfloat16, threads=1, deterministic=deterministic).ops
    weights = (
        [torch.randn((32, 16), device=DEVICE).bfloat16()] * 2,
        [torch.randn((16, 16), device=DEVICE).bfloat16()] * 2,
    )
    packed, x = ops.pack_experts(*weights), torch.randn((1, 16), device=DEVICE).bfloat16()
    routes = Routes(torch.zeros((1, 1), dtype=torch.int32, device=DEVICE), torch.ones((1, 1), device=DEVICE))
    for expected in (1 if deterministic else 3, 1):
        launches.clear()
        ops.experts(x, routes, packed, "silu")
        assert len(launches) == expected


@pytest.mark.parametrize("num_bits", [4, 8])
def test_weights_are_quantised_in_few_launches(launches: list[Work], num_bits: int) -> None:
    """A device computes chunks of the size of a processor's cache in less time than they take to launch."""
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(3))
    wanted = quantize_in_torch(weight, num_bits)
    on_device = weight.to(DEVICE)
    launches.clear()
    found = quantized_matrix(on_device, num_bits)
    assert len(launches) < 150
    assert torch.equal(found.values.cpu(), wanted.values) and torch.equal(found.scales.cpu(), wanted.scales)
