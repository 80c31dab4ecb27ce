"""Working memory of `Ops.experts` on each backend, from shapes alone: what csrc/cpu/experts keeps for a lane, and what
hydra_kernels/experts.py allocates. Needs neither.
"""

from __future__ import annotations

from typing import NamedTuple

_PANEL = 32  # columns, kPanel of csrc/cpu/linear
_MOST_PAIRS = 8192  # that are computed at once, kMostPairs of csrc/cpu/experts
_FEW_BYTES, _PART_BYTES = 2 << 20, 4 << 20  # of outputs: kept whole, and else of a part
_BLOCK = 512  # inputs, to which rounded rows are padded at most


class ExpertsShape(NamedTuple):
    """Sizes of a mixture. `num_chosen`: experts of a row, a shared one included. `num_bytes`: of an activation.
    `quantized`: weights are products of bytes, for which a CPU rounds rows."""

    num_experts: int
    num_chosen: int
    width: int
    inner: int
    num_bytes: int
    quantized: bool


def host_bytes(shape: ExpertsShape, num_rows: int, threads: int) -> int:
    """Bytes that a lane of `threads` keeps for steps of at most `num_rows` rows: rows of pairs (row, expert), products
    with gate and up, activations, the outputs that its threads add up, routes."""
    width, inner, chosen = shape.width, shape.inner, shape.num_chosen
    pairs = min(num_rows, max(1, _MOST_PAIRS // chosen)) * chosen
    panels = -(-width // _PANEL)
    outputs = pairs * panels * _PANEL * 4
    if outputs > _FEW_BYTES:
        parts = min(max(panels // 4, 1), 8 * threads)
        parts = max(1, min(max(parts, outputs // _PART_BYTES), panels))
        outputs = max(_FEW_BYTES, threads * pairs * -(-panels // parts) * _PANEL * 4)
    padded = -(-max(width, inner) // _BLOCK) * _BLOCK
    rows = pairs * (13 * padded // 4 if shape.quantized else width * shape.num_bytes)
    return rows + 3 * pairs * inner * shape.num_bytes + outputs + 16 * pairs + _route_bytes(shape, num_rows)


def device_bytes(shape: ExpertsShape, num_rows: int) -> int:
    """Bytes of the tensors that exist at once in a step of `num_rows` rows: sorted pairs, products with gate and up,
    activations, float32 outputs, routes."""
    pairs = num_rows * shape.num_chosen
    sorted_pairs = 4 * (-(-shape.num_experts // 4) * 4 + pairs)
    return pairs * (3 * shape.inner * shape.num_bytes + 4 * shape.width) + sorted_pairs + _route_bytes(shape, num_rows)


def _route_bytes(shape: ExpertsShape, num_rows: int) -> int:
    """Bytes of the router's float32 products and of numbers and weights of the chosen experts."""
    return num_rows * (4 * shape.num_experts + 8 * shape.num_chosen)
