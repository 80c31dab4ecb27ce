"""Products with weights of 8 and 4 bits beside those of the compute dtype: a matrix at a time, for steps of one row to
prompts.

The floor of each is one read of its weight, as packed, or the arithmetic of its rows in the compute dtype, which a
processor that multiplies integers can be below. Weights take turns, so none is in a cache. A result is compared with
the product of the dequantised weight first. 8 bits have a scale for each output, 4 bits one for each 128 inputs. A GPU
multiplies 8-bit floats too, with scales of outputs and of blocks of 128 x 128, and many rows of x rounded like them.
`hydra-engine bench quantized [--full]`.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.micro.encode import numbers
from bench.micro.floors import Work
from bench.micro.harness import Report, Run, agree, captured, cold_copies, in_turn, parse, scaled, timed
from bench.micro.machine import on_gpu
from bench.micro.subject import run_ops
from hydra_engine.backend.base import Backend, PackedLinear
from hydra_engine.backend.quantized import FLOAT8, FLOAT8_BLOCK, QuantizedWeight, quantized

QUICK_ROWS, FULL_ROWS = (1, 16, 1024), (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
SMALL_ROWS = (1, 8)  # of a processor
# Outputs and inputs of a decoder of 7 billion (Qwen2-VL): gate and up, down, queries with keys and values
SHAPES = ((37888, 3584), (3584, 18944), (4608, 3584))
SMALL_SHAPES = ((9728, 896), (896, 4864))
GROUPS = {"int8": (8, None), "int4": (4, 128)}  # bits, inputs of a group or whole rows
FLOATS = {"fp8": None, "fp8-128": FLOAT8_BLOCK}  # on a GPU
_ROUNDED = 0.04  # how far products may be off whose rows are rounded to 8-bit floats: 0.026 each
_MAX_COPIES = 16


class Weights(NamedTuple):
    """Equal products of several matrices: `packed` in turn, the first one dequantised in the compute dtype."""

    packed: list[PackedLinear]
    wide: Tensor

    @property
    def num_bytes(self) -> int:
        return self.packed[0].nbytes


def weights_of(backend: Backend, kind: str, shape: tuple[int, int]) -> Weights:
    device = backend.device.torch_device
    num_out, num_in = shape
    floats = kind in FLOATS
    bits, group = (8, FLOATS[kind]) if floats else GROUPS.get(kind, (8 * backend.dtype.itemsize, None))
    copies = cold_copies(device, num_out * num_in * bits // 8, most=_MAX_COPIES)
    wide = (torch.randn(shape, device=device) * num_in**-0.5).to(backend.dtype)
    if floats:
        scale = torch.full((num_out, num_in // (group or num_in)), num_in**-0.5, device=device)
        weight = QuantizedWeight(torch.randn(shape, device=device).to(FLOAT8), scale)
        return Weights([backend.ops.pack_linear(weight) for _ in range(copies)], weight.dequantized(backend.dtype))
    if kind not in GROUPS:
        return Weights([backend.ops.pack_linear(wide.clone()) for _ in range(copies)], wide)
    weight = quantized(wide, bits, group or num_in, torch.float16)
    return Weights([backend.ops.pack_linear(weight) for _ in range(copies)], weight.dequantized(backend.dtype))


def measure(arguments: argparse.Namespace, report: Report, backend: Backend) -> None:
    gpu = on_gpu(report.device)
    plain = str(backend.dtype).removeprefix("torch.")
    rows = (QUICK_ROWS, FULL_ROWS) if gpu else (SMALL_ROWS, SMALL_ROWS)
    for shape in SHAPES if gpu else SMALL_SHAPES:
        kinds = {kind: weights_of(backend, kind, shape) for kind in (*GROUPS, *(FLOATS if gpu else ()), plain)}
        for count in numbers(arguments.rows, report.quick, *rows):
            with report.case(f"linear {shape[0]} x {shape[1]} T={count}"):
                _measure(report, backend, kinds, shape, count)


def _measure(report: Report, backend: Backend, kinds: dict[str, Weights], shape: tuple[int, int], rows: int) -> None:
    num_out, num_in = shape
    device = backend.device.torch_device
    x = torch.randn((rows, num_in), device=device).to(backend.dtype)
    seconds, runs = {}, dict[str, Run]()
    for kind, weights in kinds.items():
        with report.optional(f"linear {num_out} x {num_in} {kind} T={rows}"):
            product = partial(_product, backend, x, weights)
            expected = F.linear(x.float(), weights.wide.float())
            agree(f"{kind}, T={rows}", product(0), expected, tolerance=_ROUNDED if kind in FLOATS else 0.02)
            runs[kind] = captured(device, in_turn(product, len(weights.packed)), len(weights.packed))
    for kind, found in timed(report.device, runs, report.effort).items():
        seconds |= scaled({kind: found}, len(kinds[kind].packed))
    plain = list(kinds)[-1]
    for kind in runs:
        weights = kinds[kind]
        report.row(
            f"linear {num_out} x {num_in} {kind} T={rows}",
            seconds[kind],
            work=[Work("product", 2.0 * rows * num_out * num_in, weights.num_bytes)],
            inputs={"rows": rows, "num_out": num_out, "num_in": num_in, "copies": len(weights.packed)},
            peers={plain: seconds[plain]} if kind != plain and plain in runs else {},
            bytes_per_s=weights.num_bytes / seconds[kind].median,
        )


def _product(backend: Backend, x: Tensor, weights: Weights, index: int) -> Tensor:
    return backend.ops.linear(x, weights.packed[index])


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", help="rows of x, with commas")


def main() -> None:
    arguments = parse(__doc__, options)
    run_ops("quantized", arguments, lambda report, backend: measure(arguments, report, backend))


if __name__ == "__main__":
    main()
