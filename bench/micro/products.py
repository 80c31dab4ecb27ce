"""Products of many rows with the activation that follows them, as launches: what a kernel that has it in its epilogue
would have to beat.

Of decoders and towers of the 7 billion models. `ours` is the engine's op: cuBLAS, then a launch for the activation;
`product` is cuBLAS alone, and `activation_s` what the launch behind it adds. A fused kernel gains where it is at most
that much slower than the product. The floor is the product's FLOP or one read of its weight. Results are compared
first. `hydra-engine bench products [--full]`.
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
from bench.micro.harness import Report, agree, captured, cold_copies, in_turn, parse, scaled, timed
from bench.micro.machine import on_gpu
from bench.micro.subject import run_ops
from hydra_engine.backend.base import Activation, Backend, PackedLinear

_MAX_COPIES = 16


class Product(NamedTuple):
    """`gated`: the first half of the outputs goes through the activation and multiplies the second."""

    name: str
    num_out: int
    num_in: int
    act: Activation
    gated: bool
    rows: tuple[int, ...]
    more_rows: tuple[int, ...]  # of `--full`

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_out, self.num_in


PRODUCTS = (
    Product("LLaVA gate/up", 22016, 4096, "silu", True, (1024,), (676, 1024, 2048)),
    Product("Qwen2.5-VL gate/up", 37888, 3584, "silu", True, (1024,), (1024, 1124, 2048)),
    Product("tower of Qwen2.5-VL gate/up", 6840, 1280, "silu", True, (4096,), (4096, 16384)),
    Product("tower of Qwen2-VL fc1", 5120, 1280, "quick_gelu", False, (4096,), (4096, 16384)),
    Product("CLIP fc1", 4096, 1024, "quick_gelu", False, (577, 2308), (577, 2308, 9232)),
)
SMALL = (
    Product("gate/up", 2048, 512, "silu", True, (64,), (64, 256)),
    Product("fc1", 1024, 256, "quick_gelu", False, (64,), (64, 256)),
)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", help="rows of x, with commas, of all products")


def measure(arguments: argparse.Namespace, report: Report, backend: Backend) -> None:
    gpu = on_gpu(report.device)
    for product in PRODUCTS if gpu else SMALL:
        for rows in numbers(arguments.rows, report.quick, product.rows, product.more_rows):
            what = f"{product.name} {rows} x {product.num_out} x {product.num_in}"
            with report.case(what):
                _measure(report, backend, product, rows, what)
    if gpu:
        report.skip(
            "activation in the epilogue of the product", "not built: it would have to beat `ours` of these rows"
        )


def _measure(report: Report, backend: Backend, product: Product, rows: int, what: str) -> None:
    device, dtype, ops = backend.device.torch_device, backend.dtype, backend.ops
    copies = cold_copies(device, product.num_out * product.num_in * dtype.itemsize, most=_MAX_COPIES)
    first, *others = (
        (torch.randn(product.shape, device=device) * product.num_in**-0.5).to(dtype) for _ in range(copies)
    )
    x = torch.randn((rows, product.num_in), device=device).to(dtype)
    plain = F.linear(x, first).float()
    weights = [ops.pack_linear(weight) for weight in (first.clone(), *others)]

    def ours(index: int) -> Tensor:
        if product.gated:
            return ops.linear_act_and_mul(x, (weights[index],), product.act)
        return ops.linear(x, weights[index], act=product.act)

    agree(f"{what}, ours", ours(0), activated(plain, product))
    agree(f"{what}, product", ops.linear(x, weights[0]), plain)
    runs = {"ours": ours, "product": partial(_product, backend, x, weights)}
    graphs = {name: captured(device, in_turn(run, copies), copies) for name, run in runs.items()}
    seconds = scaled(timed(device, graphs, report.effort), copies)
    added = seconds["ours"].median - seconds["product"].median
    report.row(
        f"{what} + {product.act}",
        seconds["ours"],
        work=[Work("product", 2.0 * rows * product.num_out * product.num_in, float(first.nbytes))],
        inputs={"rows": rows, "num_out": product.num_out, "num_in": product.num_in, "copies": copies},
        peers={"product": seconds["product"]},
        activation_s=added,
    )
    print(f"{'':60}the activation adds {added * 1e6:.1f} us, {added / seconds['product'].median:.1%} of the product")


def _product(backend: Backend, x: Tensor, weights: list[PackedLinear], index: int) -> Tensor:
    return backend.ops.linear(x, weights[index])


def activated(plain: Tensor, product: Product) -> Tensor:
    """The activation after the product, in torch."""
    if not product.gated:
        return plain * torch.sigmoid(1.702 * plain)
    gate, up = plain.chunk(2, dim=1)
    return F.silu(gate) * up


def main() -> None:
    arguments = parse(__doc__, options)
    run_ops("products", arguments, lambda report, backend: measure(arguments, report, backend))


if __name__ == "__main__":
    main()
