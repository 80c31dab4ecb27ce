"""Rounds rows of a float type to 8-bit floats (E4M3), with a step per row or per 128 inputs of it.

    step = max |x| / 448        number = e4m3(x * (448 / max |x|)), ties to even

torch's `_scaled_mm` multiplies them with a weight packed by `quantized_linear.pack`. Its words have a special order of
inputs; the rows are written in the same order, so one copy of a weight serves both kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._checks import check_rows, described
from hydra_kernels._common import row_launch
from hydra_kernels._sizes import cdiv, next_power_of_2

PART = 32  # inputs: a word holds input j of a part and of the next part
BLOCK = 128  # inputs that share a step


@triton.jit
def _octets(values: tl.tensor) -> tl.tensor:
    """Bits of the nearest E4M3 numbers, int32, of float32 values of magnitudes up to 448; NaN stays NaN."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    wide = magnitude.to(tl.float32, bitcast=True)
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960  # 120 off the exponent, above 3 bits
    subnormal = (wide + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # steps of 2^-9, rounded by the addition
    octets = tl.where(wide < 0.015625, subnormal, normal)
    return tl.where(wide < 464.0, octets, 127) | ((bits >> 24) & 128)


@triton.jit(do_not_specialize=["num_rows", "stride_step"])
def _round_rows_kernel(
    x: tl.tensor,
    words: tl.tensor,
    steps: tl.tensor,
    num_rows: tl.tensor,
    stride_step: tl.tensor,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE_X: tl.constexpr,
    PART: tl.constexpr,
    GROUP_WORDS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Rounds one row, held in registers as [GROUPS, COLUMNS] words of two numbers, and stores words and steps. Grid
    (R,). Rows from `num_rows` on are zeros. GROUP_WORDS: words that share a step."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    place = tl.arange(0, COLUMNS)
    word = group[:, None] * GROUP_WORDS + place[None, :]
    inside = (place < GROUP_WORDS)[None, :] & (word < WIDTH)
    first = word // PART * PART + word
    end = tl.where(row < num_rows, K, 0)
    lower = tl.load(x + row * STRIDE_X + first, mask=inside & (first < end), other=0.0).to(tl.float32)
    upper = tl.load(x + row * STRIDE_X + first + PART, mask=inside & (first + PART < end), other=0.0).to(tl.float32)
    # Magnitudes as integers, which have the same order, with NaN above all.
    bits = tl.maximum(lower.to(tl.int32, bitcast=True) & 0x7FFFFFFF, upper.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    top = tl.max(bits, axis=1).to(tl.float32, bitcast=True)
    tiny = top < 7.888609052210118e-31  # 2^-100
    inverse = tl.where(tiny, 0.0, tl.div_rn(448.0, tl.where(tiny, 1.0, top)))
    step = tl.where(tiny, 0.0, tl.div_rn(top, 448.0))
    octets = _octets(lower * inverse[:, None]) | (_octets(upper * inverse[:, None]) << 8)
    tl.store(words + row * WIDTH + word, octets.to(tl.int16), mask=inside)
    tl.store(steps + row + group * stride_step, step, mask=group * GROUP_WORDS < WIDTH)


def round_rows(x: Tensor, width: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Rounds x [M, K] of a float type, rows at any stride. Returns (numbers float8_e4m3fn [R, 2 * width], steps float32
    [R, G]), numbers in the order of the weight's words and zero-padded; x is about number * step.

    width: int16 words of a row of the packed weight, a multiple of 32 with 2 * width >= K. group_size: inputs that
    share a step, K (G = 1, R = M), or 128, which divides K; then R is M rounded up to a multiple of 4 with zero rows,
    and steps have strides (1, R), as tensor cores require. Raises ValueError for other sizes. In a group with a number
    that is not finite, number * step is NaN; a group whose magnitudes are all below 2^-100 becomes zeros.
    """
    check_rows("x", x)
    num_rows, num_in = x.shape
    if group_size not in (num_in, BLOCK) or num_in % group_size or 2 * width < num_in or width % PART:
        raise ValueError(
            f"x: expected [M, K] of whole groups of {group_size} and at most {2 * width}, got {described(x)}"
        )
    num_groups = num_in // group_size
    out_rows = num_rows if num_groups == 1 else cdiv(num_rows, 4) * 4
    words = torch.empty((out_rows, width), dtype=torch.int16, device=x.device)
    steps = torch.empty((num_groups, out_rows), dtype=torch.float32, device=x.device).t()
    if out_rows:
        group_words = width if num_groups == 1 else BLOCK // 2
        columns, groups = next_power_of_2(group_words), next_power_of_2(num_groups)
        _round_rows_kernel[(out_rows,)](
            *(x, words, steps, num_rows, out_rows),
            K=num_in,
            WIDTH=width,
            STRIDE_X=x.stride(0),
            PART=PART,
            GROUP_WORDS=group_words,
            GROUPS=groups,
            COLUMNS=columns,
            num_warps=row_launch(2 * columns * groups).warps,
        )
    return words.view(torch.float8_e4m3fn), steps
