"""Kernels compiled for one step serve every other: nothing is compiled while requests are served."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from bench.micro.layer import without_dependent_launch
from hydra_engine.backend.quantized import quantized as quantized_weight
from hydra_kernels.activation import act_and_mul, sigmoid_mul
from hydra_kernels.causal_conv import TILE, causal_conv
from hydra_kernels.decode_attention import decode_attention
from hydra_kernels.delta_rule import delta_rule
from hydra_kernels.epilogue import finish
from hydra_kernels.experts import grouped_experts, route_tokens
from hydra_kernels.float8_rows import round_rows
from hydra_kernels.fused_linear import gated_linear, rope_linear
from hydra_kernels.linear import invariant_linear, small_linear
from hydra_kernels.logits import score_tokens
from hydra_kernels.norms import add_layer_norm, add_rms_norm, gated_rms_norm, layer_norm, rms_norm
from hydra_kernels.packed_attention import packed_attention
from hydra_kernels.pixels import pixel_rows
from hydra_kernels.prefill_attention import prefill_attention
from hydra_kernels.quantized_linear import invariant_quantized_linear, small_quantized_linear
from hydra_kernels.rotary import rotate
from hydra_kernels.sampling import sample
from tests.gpu.side import interpreted
from tests.kernels.compiling import record, specialised
from tests.kernels.launch_cases import BF16, QUANTIZED, adjustments

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="this process interprets kernels; unset TRITON_INTERPRET"
)


def of_step(tokens: int, first: int) -> object:
    """Calls every kernel whose arguments follow from a step of `tokens` rows that begin at row `first` of what was
    sent."""
    rest = slice(first, first + tokens)
    x, wide, hidden = (torch.zeros(64, size, dtype=BF16)[rest] for size in (4096, 2 * 4096, 6144))
    context, cu_q = torch.zeros(65, dtype=torch.int32)[rest], torch.zeros(66, dtype=torch.int32)[first:][: tokens + 1]
    tables, cache = torch.zeros(64, 37, dtype=torch.int32)[rest], torch.zeros(4, 2, 2, 16, 4, 64, dtype=BF16)
    k_cache, v_cache, q = cache[:, 1, 0], cache[:, 1, 1], torch.zeros(64, 28, 64, dtype=BF16)[rest]
    # Of one bucket: what else is compiled for is its number of rows.
    mixed = tables.new_zeros(8, 37), torch.zeros(10, dtype=torch.int32)[1:], torch.zeros(9, dtype=torch.int32)[1:]
    places, tiles = torch.zeros(65, dtype=torch.int64)[first:], torch.zeros(64, 2, dtype=torch.int32)[rest]
    projection = x.new_zeros(36 * 64, 4096), None, *torch.zeros(2, tokens, 32), places[:tokens]
    vectors = places[: tokens + 1], *(places[:tokens],) * 3
    fields = torch.zeros(5, 64)[:, rest]
    conv, state = torch.zeros(2, 3, 6144, dtype=BF16), torch.zeros(2, 16, 128, 128)
    parts = hidden.view(tokens, 3, 16, 128).unbind(1)
    taps, scales = torch.zeros(6144, 4, dtype=BF16), torch.zeros(2, 16)
    return (
        pixel_rows(torch.zeros(tokens, 1176, dtype=torch.uint8), torch.zeros(256, 3, dtype=BF16), 1176),
        rms_norm(x, x[0], 1e-5),
        rms_norm(parts[0], x[0, :128], 1e-5),
        add_rms_norm(x, x, x[0], 1e-5),
        gated_rms_norm(parts[0], x[0, :128], parts[1], 1e-5),
        layer_norm(x, x[0], x[0], 1e-5),
        add_layer_norm(x, x, x[0], x[0], 1e-5),
        act_and_mul(wide, "silu"),
        sigmoid_mul(parts[0], parts[1]),
        rotate(parts[0], *torch.zeros(2, tokens, 64)),
        finish(x, None, x, "gelu"),
        round_rows(x, 2048, 4096),
        *((small_linear(x, x.new_zeros(512, 4096)),) if 1 < tokens <= 16 else ()),
        *((gated_linear(x, x.new_zeros(512, 4096), None, "silu"),) if 1 < tokens <= 16 else ()),
        *((rope_linear(x, *projection, k_cache, v_cache),) if 1 < tokens <= 16 else ()),
        invariant_linear(x, x.new_zeros(512, 4096)),
        small_quantized_linear(x, QUANTIZED),
        invariant_quantized_linear(x, QUANTIZED),
        prefill_attention(q, k_cache, v_cache, tables, cu_q, context, 0.1, max_q=tokens),
        prefill_attention(q, k_cache, v_cache, *mixed, 0.1, max_q=tokens, max_requests=8),
        packed_attention(q, q, q, cu_q, 0.1, max_length=tokens),
        *(decode_attention(q, k_cache, v_cache, tables, context, 0.1, num_splits=splits) for splits in (3, 1)),
        sample(torch.zeros(tokens, 32064), fields[0], fields[1].int(), *fields[2:]),
        adjustments(torch.zeros(tokens, 32064), first),
        score_tokens(torch.zeros(tokens, 32064), places[:tokens], cu_q[:tokens], 20),
        causal_conv(hidden, taps, conv, tiles, *vectors, tokens=TILE),
        delta_rule(*parts, x[:, :16], x[:, 16:32], *scales, state, *vectors),
        *mixture(x[:, :64]),
    )


def mixture(x: Tensor) -> tuple[object, ...]:
    """Three of seven experts for each row, of which the third is shared."""
    logits = x.new_zeros(x.shape[0], 7)
    experts, weights = route_tokens(logits[:, :6], 2, renormalise=True, shared=logits[:, 6:])
    matrices = x.new_zeros(7, 64, 64), x.new_zeros(7, 64, 32)
    return experts, *(grouped_experts(x, experts, weights, *matrices, "silu", many=many) for many in (False, True))


def test_no_step_needs_a_kernel_that_another_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is compiled anew for an integer that is 1 or a multiple of 16, or an address that is, where it has not
    been told to look away. While serving that costs a second, and inside a captured step it cannot be."""
    seen: dict[str, set[str]] = {}
    for tokens, first in ((16, 0), (3, 0), (2, 1), (16, 3), (1, 5), (33, 2), (7, 16)):
        for launch in record(monkeypatch, lambda t=tokens, f=first: of_step(t, f)):
            compiled_for = repr((specialised(launch), launch.options))
            seen.setdefault(launch.name, set()).add(compiled_for)
    kinds = {name: len(kinds) for name, kinds in seen.items()}
    # Forms of the wrappers above.
    several = {
        "_rms_norm_kernel": 4,
        "_layer_norm_kernel": 2,
        "_prefill_kernel": 2,
        "_decode_gqa_kernel": 2,
        "_quantized_linear_kernel": 3,
        "_join_splits_kernel": 2,
        "_act_and_mul_kernel": 2,
        "_grouped_linear_kernel": 4,
    }
    assert kinds == {name: several.get(name, 1) for name in kinds}


def test_kernels_that_shall_wait_are_launched_so_though_launches_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(4, 256, dtype=BF16)

    def begins_early() -> bool:
        (launch,) = record(monkeypatch, lambda: rms_norm(x, x[0], 1e-5))
        assert launch.options["launch_pdl"] == launch.arguments["PDL"]
        return bool(launch.options["launch_pdl"])

    found = [begins_early()]
    with without_dependent_launch():
        found.append(begins_early())
    assert [*found, begins_early()] == [True, False, True]


@pytest.mark.parametrize("num_bits", [8, 4])
def test_the_first_product_with_a_quantised_weight_compiles_for_all_others(
    monkeypatch: pytest.MonkeyPatch, num_bits: int
) -> None:
    ops = interpreted().ops
    weight = quantized_weight(torch.zeros(2048, 1024), num_bits, 128, BF16)
    packed_linear = ops.pack_linear(weight, torch.zeros(2048))

    def kinds(rows: int) -> set[str]:
        x, residual = torch.zeros(rows, 1024, dtype=BF16), torch.zeros(rows, 2048, dtype=BF16)
        launches = record(monkeypatch, lambda: ops.linear(x, packed_linear, residual=residual))
        return {repr((launch.name, specialised(launch), launch.options)) for launch in launches}

    first = kinds(3)
    assert all(kinds(rows) <= first for rows in (1, 2, 16, 17, 33, 64, 65, 200, 3000))
