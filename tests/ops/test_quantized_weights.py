"""Weights in 8 and 4 bits: their form, the reference product, and layers that get them from a checkpoint."""

from __future__ import annotations

import pytest
import torch

from hydra_engine.backend.quantized import FLOAT8, QuantizedWeight, quantized, quantized_rows, stacked
from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_engine.models.layers.basic import Linear
from hydra_engine.models.loading.parameters import Demands, Scope

CPU = torch.device("cpu")


def _weight(num_out: int = 24, num_in: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("num_bits", "group_size", "error"), [(8, 64, 0.51), (8, 16, 0.51), (4, 32, 0.51), (4, 16, 0.51)]
)
def test_rounds_to_the_nearest_step(num_bits: int, group_size: int, error: float) -> None:
    weight = _weight()
    weight[3] = 0
    result = quantized(weight, num_bits, group_size, torch.bfloat16)
    steps = result.scales.float().repeat_interleave(group_size, dim=1)
    assert ((result.dequantized(torch.float32) - weight).abs() <= error * steps + 1e-9).all()
    assert result.shape == weight.shape
    assert result.group_size == group_size
    assert result.numbers()[3].eq(0).all()


def test_four_bits_pack_even_inputs_low() -> None:
    values = torch.tensor([[0x80, 0xF7]], dtype=torch.uint8)
    weight = QuantizedWeight(values, torch.ones(1, 1), None, 4)
    assert weight.numbers().tolist() == [[-8, 0, -1, 7]]


@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize("with_offsets", [False, True])
def test_reference_product_is_near_that_of_the_dequantised_weight(num_bits: int, *, with_offsets: bool) -> None:
    weight = quantized(_weight(), num_bits, 32, torch.float16)
    if with_offsets:
        weight = QuantizedWeight(weight.values, weight.scales, torch.randn(24, 2), num_bits)
    x = torch.randn(5, 64)
    ops = ReferenceOps()
    bias = torch.randn(24)
    result = ops.linear(x, ops.pack_linear(weight, bias))
    expected = x @ weight.dequantized(torch.float32).T + bias
    assert (result - expected).norm() / expected.norm() < 0.01
    rows, steps = quantized_rows(x, 32)
    exact = (rows * steps[..., None]).flatten(2)[:, :, :32].flatten(1) @ weight.dequantized(torch.float32).T + bias
    torch.testing.assert_close(result, exact, rtol=1e-5, atol=1e-4)


def test_a_row_that_is_not_finite_gives_nan_and_spares_the_others() -> None:
    ops = ReferenceOps()
    weight = ops.pack_linear(quantized(_weight(), 8, 64, torch.float32))
    x = torch.randn(3, 64)
    whole = ops.linear(x, weight)
    x[1, 5] = torch.inf
    result = ops.linear(x, weight)
    assert result[1].isnan().all()
    assert torch.equal(result[[0, 2]], whole[[0, 2]])


@pytest.mark.parametrize(
    ("values", "scales", "offsets", "num_bits", "named"),
    [
        (torch.zeros(2, 64, dtype=torch.int8), torch.ones(2, 1), None, 5, "num_bits"),
        (torch.zeros(2, 64, dtype=torch.int8), torch.ones(2, 1), None, 4, "values"),
        (torch.zeros(2, 64, dtype=torch.int8), torch.ones(3, 1), None, 8, "scales"),
        (torch.zeros(2, 64, dtype=torch.int8), torch.ones(2, 8), None, 8, "scales"),
        (torch.zeros(2, 64, dtype=torch.int8), torch.ones(2, 2), torch.ones(2, 1), 8, "offsets"),
    ],
)
def test_a_wrong_form_is_refused(
    values: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, num_bits: int, named: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{named}: expected"):
        QuantizedWeight(values, scales, offsets, num_bits)


@pytest.mark.parametrize(
    ("groups", "block_shape", "num_bits", "named"),
    [
        (16, (2, 1, 1), 8, "num_bits"),
        (16, (2, 1, 2), 6, "block_scales"),
        (16, (2, 2, 1), 6, "block_scales"),
        (1, (2, 1, 1), 5, "num_bits"),
    ],
)
def test_wrong_scales_in_two_levels_are_refused(
    groups: int, block_shape: tuple[int, ...], num_bits: int, named: str
) -> None:
    values, scales = torch.zeros(2, 256, dtype=torch.int8), torch.ones(2, groups, dtype=torch.int8)
    with pytest.raises(ValueError, match=rf"^{named}: expected"):
        QuantizedWeight(values, scales, None, num_bits, torch.ones(block_shape, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"^scales: expected .* int8"):
        QuantizedWeight(values, scales.float(), None, 6, torch.ones(2, 1, 1, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"^block_scales: expected whole groups in blocks of 256 of the 384 inputs"):
        wide, few = torch.zeros(2, 384, dtype=torch.int8), torch.ones(2, 12, dtype=torch.int8)
        QuantizedWeight(wide, few, None, 6, torch.ones(2, 1, 1, dtype=torch.float16))


def test_outputs_of_scales_in_two_levels_are_chosen_stacked_and_scaled() -> None:
    generator = torch.Generator().manual_seed(3)
    values, scales, offsets = (
        torch.randint(-32, 32, (6, size), dtype=torch.int8, generator=generator) for size in (512, 16, 16)
    )
    weight = QuantizedWeight(values, scales, offsets, 6, torch.randn(6, 2, 2, generator=generator).half())
    dense = weight.dequantized(torch.float32)
    tops = weight.block_scales.float().repeat_interleave(8, dim=1)  # type: ignore[union-attr]
    wide = (tops[:, :, 0] * scales)[:, :, None] * values.unflatten(1, (16, 32)) - (tops[:, :, 1] * offsets)[:, :, None]
    assert torch.equal(dense, wide.flatten(1))
    assert weight.flatten_scales().num_bits == 8 and weight.stack_key != weight.flatten_scales().stack_key
    order = torch.tensor([5, 0, 3])
    assert torch.equal(
        stacked([weight.rows(order), weight]).dequantized(torch.float32), torch.cat((dense[order], dense))
    )
    factors = torch.tensor([2.0, 1.0, 0.5, 4.0, -1.0, 0.0])
    assert torch.equal(weight.scaled(factors).dequantized(torch.float32), dense * factors[:, None])


@pytest.mark.parametrize("form", ["8", "4", "float8"])
@pytest.mark.parametrize("with_offsets", [False, True])
def test_more_outputs_and_inputs_are_zeros(form: str, *, with_offsets: bool) -> None:
    """Rows are whole and share a scale; offsets are added to all inputs of an output."""
    dense, offsets = _weight(24, 60), torch.randn(24, 1) if with_offsets else None
    values = dense.to(FLOAT8) if form == "float8" else quantized(dense, int(form), 60, torch.float16).values
    weight = QuantizedWeight(values, torch.rand(24, 1), offsets, 4 if form == "4" else 8)
    padded, plain = weight.padded(8, 4), weight.dequantized(torch.float32)
    assert padded.shape == (32, 64) and padded.group_size == 64 and padded.is_float == weight.is_float
    wide = padded.dequantized(torch.float32)
    assert torch.equal(wide[:24, :60], plain) and wide[24:].eq(0).all()
    assert torch.equal(wide[:24, 60:], torch.zeros(24, 4) if offsets is None else offsets.expand(24, 4))
    with pytest.raises(ValueError, match=r"^num_in: expected 0 for inputs in groups of 16, got 4"):
        quantized(_weight(), 8, 16, torch.float16).padded(0, 4)


def test_more_outputs_of_scales_in_two_levels_are_zeros() -> None:
    values, scales = torch.full((2, 128), 0x9F, dtype=torch.uint8), torch.full((2, 8), 5, dtype=torch.int8)
    weight = QuantizedWeight(values, scales, scales, 4, torch.ones(2, 1, 2, dtype=torch.float16))
    wide = weight.padded(3, 0).dequantized(torch.float32)
    assert torch.equal(wide[:2], weight.dequantized(torch.float32)) and wide[2:].eq(0).all() and len(wide) == 5


def test_a_layer_keeps_parts_of_several_forms_side_by_side() -> None:
    """Two neighbours of one form are one weight; a part that is not quantised stays so."""
    parts = {"a": 8, "b": 16, "c": 24}
    demands = Demands()
    linear = Linear(Scope(ReferenceOps(), torch.float32, CPU, demands), parts, 64, bias=True)
    weights = [quantized(_weight(8), 8, 64, torch.float32), quantized(_weight(16), 8, 64, torch.float32), _weight(24)]
    biases = [torch.randn(n) for n in parts.values()]
    for name, weight, bias in zip(parts, weights, biases, strict=True):
        slot = demands.slots[f"{name}.weight"]
        if isinstance(weight, QuantizedWeight):
            assert slot.fill_quantized is not None
            slot.fill_quantized(weight)
        else:
            slot.fill(weight)
        demands.slots[f"{name}.bias"].fill(bias)
    assert [part.num_out for part in linear.packed] == [24, 24]
    x, residual = torch.randn(3, 64), torch.randn(3, 48)
    ops = ReferenceOps()
    expected = torch.cat(
        [ops.linear(x, ops.pack_linear(weight, bias)) for weight, bias in zip(weights, biases, strict=True)], dim=1
    )
    assert torch.equal(linear(x), expected)
    assert torch.equal(linear(x, residual=residual), expected + residual)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_layer_that_mixes_outputs_takes_quantised_parts(*, mixed: bool) -> None:
    """The order is reversed; parts of two forms become tensors, whose sums are those of the dequantised weights."""
    demands = Demands()
    linear = Linear(
        Scope(ReferenceOps(), torch.float32, CPU, demands),
        {"a": 8, "b": 16},
        64,
        bias=False,
        arrange=lambda parts: torch.cat(parts).flip(0),
    )
    weights = [
        quantized(_weight(8), 8, 64, torch.float32),
        quantized(_weight(16), 4 if mixed else 8, 64, torch.float32),
    ]
    for name, weight in zip("ab", weights, strict=True):
        fill = demands.slots[f"{name}.weight"].fill_quantized
        assert fill is not None
        fill(weight)
    x = torch.randn(3, 64)
    ops = ReferenceOps()
    if mixed:
        expected = x @ torch.cat([weight.dequantized(torch.float32) for weight in weights]).flip(0).T
        torch.testing.assert_close(linear(x), expected)
    else:
        assert torch.equal(linear(x), ops.linear(x, ops.pack_linear(stacked(weights))).flip(1))
