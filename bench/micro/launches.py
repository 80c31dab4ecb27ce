"""The fastest launch parameters on this GPU: the figures behind the tables of hydra_kernels/_common.py.

For each kernel and size every sensible entry of its table is compiled, by several processes at once, compared with
torch, and timed as a graph over inputs that are in no cache. The floor is one read of the weights or the context at the
read bandwidth of the same run, or the products at its best rate. The last lines are the three fastest of each case
beside what the table has. `python -m bench.micro.launches [--cases rows-1,decode]`; GPUs only.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.micro import ceilings
from bench.micro.floors import Work, attention_work
from bench.micro.harness import Effort, Report, captured, cold_copies, in_turn, parse, scaled, timed
from bench.micro.machine import on_gpu

_EFFORT = Effort(5, 0.0005, 0.05)
_TOLERANCE = 0.02
_COPIES = 8
_SHARED = 227 << 10  # bytes that a program may have
_BLOCK, _CONTEXT = 16, 1024


class Case(NamedTuple):
    """A kernel at one size: `table` is the function of `module` whose entries are tried."""

    name: str
    module: str
    table: str
    entries: list[tuple[int, ...]]
    make: Callable[[torch.device, int], Inputs]  # with so many copies at most


class Inputs(NamedTuple):
    """`launch(n)` computes with the n-th of `copies` equal inputs; `expected` is what it gives for the first, `peer`
    torch's own for the same product."""

    launch: Callable[[int], Tensor]
    expected: Tensor
    copies: int
    work: Work
    peer: Callable[[int], Tensor] | None = None


def random(device: torch.device, *sizes: int, scale: float = 1.0) -> Tensor:
    return torch.empty(sizes, dtype=torch.bfloat16, device=device).normal_() * scale


# ---- products of few rows


def products(rows: int, num_out: int, num_in: int, device: torch.device, most: int) -> Inputs:
    from hydra_kernels.linear import small_linear

    copies = cold_copies(device, num_out * num_in * 2, most=most)
    weights = [random(device, num_out, num_in, scale=num_in**-0.5) for _ in range(copies)]
    x, residual = random(device, rows, num_in), random(device, rows, num_out)
    expected = F.linear(x, weights[0]) + residual
    work = Work("weights", 2.0 * rows * num_out * num_in, num_out * num_in * 2.0)

    def peer(n: int) -> Tensor:
        return torch.addmm(residual, x, weights[n].t())

    return Inputs(lambda n: small_linear(x, weights[n], None, residual), expected, copies, work, peer)


def gated(rows: int, width: int, num_in: int, device: torch.device, most: int) -> Inputs:
    """Inputs of a row with its norm."""
    from hydra_kernels.fused_linear import gated_linear

    copies = cold_copies(device, 2 * width * num_in * 2, most=most)
    weights = [random(device, 2 * width, num_in, scale=num_in**-0.5) for _ in range(copies)]
    x, norm = random(device, rows, num_in), random(device, num_in) if rows == 1 else None
    normed = x if norm is None else F.rms_norm(x, (num_in,), norm, 1e-5)
    gate, up = F.linear(normed, weights[0]).chunk(2, dim=1)
    work = Work("weights", 4.0 * rows * width * num_in, width * num_in * 4.0)

    def launch(n: int) -> Tensor:
        return gated_linear(x, weights[n], None, "silu", norm, 1e-5)

    return Inputs(launch, F.silu(gate) * up, copies, work, lambda n: F.linear(normed, weights[n]))


def quantized(rows: int, num_out: int, num_in: int, num_bits: int, device: torch.device, most: int) -> Inputs:
    """Inputs with weights quantised in groups of 128."""
    from hydra_kernels.quantized_linear import pack, small_quantized_linear

    copies = cold_copies(device, num_out * num_in * num_bits // 8, most=most)
    numbers = torch.randint(-(1 << num_bits - 1), 1 << num_bits - 1, (num_out, num_in), dtype=torch.int8, device=device)
    scales = torch.rand((num_out, num_in // 128), device=device).bfloat16() * num_in**-0.5
    values = numbers if num_bits == 8 else ((numbers[:, ::2] + 8) | (numbers[:, 1::2] + 8) << 4).view(torch.uint8)
    packed = pack(values, scales, None, num_bits)
    weights = [packed._replace(words=packed.words.clone()) for _ in range(copies)]
    x = random(device, rows, num_in)
    expected = F.linear(x.float(), numbers.float() * scales.float().repeat_interleave(128, dim=1))
    work = Work("weights", 2.0 * rows * num_out * num_in, float(packed.words.nbytes + scales.nbytes))
    return Inputs(lambda n: small_quantized_linear(x, weights[n]), expected, copies, work)


def entries_of_quantized(num_out: int) -> Iterator[tuple[int, ...]]:
    for columns, depth, warps, stages in itertools.product((32, 64, 128), (128, 256), (4, 8), (3, 4)):
        if columns < 16 * warps and (columns, warps) != (32, 4):
            continue
        for splits in (1, 2, 4):
            if splits == 1 or -(-num_out // columns) * splits <= 600:
                yield 16, columns, depth, warps, stages, splits


def entries_of_many_rows(rows: int, num_out: int) -> Iterator[tuple[int, ...]]:
    for columns, depth, warps, stages in itertools.product((64, 128), (64, 128, 256), (4, 8), (4, 6)):
        held = (columns + rows) * depth * 2 * (stages - 1)
        if 48 << 10 <= held <= 190 << 10:
            for splits in (1, 2) if num_out < 8192 else (1,):
                yield rows, columns, depth, warps, stages, splits


def entries_of_one_row(*, pairs: bool) -> Iterator[tuple[int, ...]]:
    for columns, depth, warps, stages in itertools.product((1, 2, 4, 8), (1024, 2048, 4096), (4, 8), (1, 3, 5)):
        held = columns * depth * (4 if pairs else 2)
        if 4096 <= held <= 32768 and held * max(stages - 1, 1) <= 128 << 10 and (columns > 1 or pairs):
            yield 1, columns, depth, warps, stages, 1


def entries_of_few_rows(num_out: int, *, pairs: bool) -> Iterator[tuple[int, ...]]:
    for columns, depth, warps, stages in itertools.product((16, 32, 64, 128), (128, 256, 512), (4, 8), (3, 4, 6)):
        held = (columns + 16) * depth * 2 * (stages - 1)
        if not 48 << 10 <= held <= 200 << 10 or (warps == 8 and columns < 64):
            continue
        programs = -(-num_out // columns)
        for splits in (1, 2, 4):
            if splits == 1 or (not pairs and programs * splits <= 600):
                yield 16, columns // 2 if pairs else columns, depth, warps, stages, splits


# ---- attention


def decodes(rows: int, heads: int, kv_heads: int, dim: int, device: torch.device, most: int) -> Inputs:
    from hydra_kernels._common import num_sms_of
    from hydra_kernels.decode_attention import choose_num_splits, decode_attention, new_counters, programs_per_sm

    blocks = _CONTEXT // _BLOCK
    layers = cold_copies(device, rows * _CONTEXT * 2 * kv_heads * dim * 2, most=most)
    data = random(device, rows * blocks, layers, 2, _BLOCK, kv_heads, dim)
    tables = torch.randperm(rows * blocks, dtype=torch.int32).view(rows, blocks).to(device)
    context = torch.full((rows,), _CONTEXT, dtype=torch.int32, device=device)
    q, counters = random(device, rows, heads, dim), new_counters(device)
    both = data[:, 0][tables.long()].permute(2, 0, 4, 1, 3, 5).flatten(3, 4)
    gqa = heads != kv_heads
    expected = F.scaled_dot_product_attention(q[:, :, None], both[0], both[1], enable_gqa=gqa)[:, :, 0]
    num_sms = num_sms_of(device)

    def launch(n: int) -> Tensor:
        given = q, data[:, n, 0], data[:, n, 1], tables, context, dim**-0.5
        splits = choose_num_splits(rows, kv_heads, _CONTEXT, num_sms * programs_per_sm(*given))
        return decode_attention(*given, num_splits=splits, counters=counters)

    return Inputs(launch, expected, layers, attention_work(heads, kv_heads, dim, rows, _CONTEXT, 2))


def entries_of_decodes(*, grouped: bool) -> Iterator[tuple[int, ...]]:
    for keys, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4, 5)):
        if keys * 512 * stages <= _SHARED and (grouped or keys <= 64):
            yield 16 if grouped else 1, keys, warps, stages


def prompts(rows: int, length: int, heads: int, kv_heads: int, dim: int, device: torch.device, most: int) -> Inputs:
    from hydra_kernels.prefill_attention import prefill_attention

    blocks = length // _BLOCK
    data = random(device, rows * blocks, 1, 2, _BLOCK, kv_heads, dim)
    tables = torch.randperm(rows * blocks, dtype=torch.int32).view(rows, blocks).to(device)
    context = torch.full((rows,), length, dtype=torch.int32, device=device)
    cu_q = torch.arange(rows + 1, dtype=torch.int32, device=device) * length
    q = random(device, rows * length, heads, dim)
    both = data[:, 0][tables.long()].permute(2, 0, 4, 1, 3, 5).flatten(3, 4)
    expected = F.scaled_dot_product_attention(
        q.view(rows, length, heads, dim).transpose(1, 2), *both, is_causal=True, enable_gqa=heads != kv_heads
    )
    flops = 2.0 * rows * length * (length + 1) * heads * dim

    def launch(_: int) -> Tensor:
        given = q, data[:, 0, 0], data[:, 0, 1], tables, cu_q, context, dim**-0.5
        return prefill_attention(*given, max_q=length)

    return Inputs(launch, expected.transpose(1, 2).flatten(0, 1), most, Work("attention", flops))


def tower(heads: int, dim: int, length: int, device: torch.device, most: int) -> Inputs:
    from hydra_kernels.packed_attention import packed_attention

    q, k, v = (random(device, length, heads, dim) for _ in range(3))
    bounds = torch.tensor([0, length], dtype=torch.int32, device=device)
    expected = F.scaled_dot_product_attention(*(part.transpose(0, 1)[None] for part in (q, k, v)))[0].transpose(0, 1)
    work = Work("attention", 4.0 * length**2 * heads * dim)
    return Inputs(lambda _: packed_attention(q, k, v, bounds, dim**-0.5, max_length=length), expected, most, work)


def entries_of_tiles(dim: int) -> Iterator[tuple[int, ...]]:
    width = dim if dim in (64, 128) else 80
    for rows, keys, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
        if 4 * width * keys * stages <= _SHARED - 4 * width * rows and (rows > 64 or warps == 4):
            yield rows, keys, warps, stages


@cache
def cases() -> dict[str, Case]:
    """The cases by name, in the sizes of models of 7 billion parameters."""
    small, pairs = ("hydra_kernels.linear", "small_launch"), ("hydra_kernels.fused_linear", "pairs_launch")
    found = []
    for num_out, num_in in ((4096, 4096), (4096, 11008), (3584, 18944)):
        one = list(entries_of_one_row(pairs=False))
        found.append(Case(f"rows-1 {num_out} x {num_in}", *small, one, partial(products, 1, num_out, num_in)))
        if num_out == 4096:
            few = list(entries_of_few_rows(num_out, pairs=False))
            found.append(Case(f"rows-16 {num_out} x {num_in}", *small, few, partial(products, 16, num_out, num_in)))
    for width, num_in in ((11008, 4096), (18944, 3584)):
        one = list(entries_of_one_row(pairs=True))
        found.append(Case(f"gated-1 {width} x {num_in}", *pairs, one, partial(gated, 1, width, num_in)))
        if num_in == 4096:
            few = list(entries_of_few_rows(2 * width, pairs=True))
            found.append(Case(f"gated-16 {width} x {num_in}", *pairs, few, partial(gated, 16, width, num_in)))
    for rows, num_out, num_in in ((64, 4096, 4096), (64, 3584, 18944), (64, 12288, 4096)):
        many = list(entries_of_many_rows(rows, num_out))
        found.append(Case(f"rows-{rows} {num_out} x {num_in}", *small, many, partial(products, rows, num_out, num_in)))
    words = ("hydra_kernels.quantized_linear", "few_rows_quantized_launch")
    for num_out, num_in, bits in ((37888, 3584, 4), (4608, 3584, 4), (3584, 18944, 4), (37888, 3584, 8)):
        entries, name = list(entries_of_quantized(num_out)), f"quantized-16 {num_out} x {num_in} in {bits} bits"
        found.append(Case(name, *words, entries, partial(quantized, 16, num_out, num_in, bits)))
    decode = ("hydra_kernels.decode_attention", "decode_launch")
    for rows, heads, kv_heads in ((1, 28, 4), (64, 28, 4), (1, 32, 32), (64, 32, 32)):
        entries = list(entries_of_decodes(grouped=heads != kv_heads))
        name = f"decode {heads}:{kv_heads} B={rows}"
        found.append(Case(name, *decode, entries, partial(decodes, rows, heads, kv_heads, 128)))
    prefill = ("hydra_kernels.prefill_attention", "prefill_launch")
    for rows, length, heads, kv_heads in ((1, 1024, 32, 32), (8, 2048, 32, 32), (1, 1024, 28, 4)):
        entries, name = list(entries_of_tiles(128)), f"prefill {heads}:{kv_heads} S={length} b={rows}"
        found.append(Case(name, *prefill, entries, partial(prompts, rows, length, heads, kv_heads, 128)))
    packed = ("hydra_kernels.packed_attention", "packed_launch")
    for dim, length in ((64, 577), (80, 4096)):
        entries, name = list(entries_of_tiles(dim)), f"tower 16x{dim} {length} rows"
        found.append(Case(name, *packed, entries, partial(tower, 16, dim, length)))
    return {case.name: case for case in found}


# ---- trying them


def entry_of(numbers: Sequence[int]) -> Any:
    from hydra_kernels._common import AttentionLaunch, LinearLaunch

    return LinearLaunch(*numbers) if len(numbers) == 6 else AttentionLaunch(*numbers)


@contextmanager
def table_of(case: Case, numbers: tuple[int, ...]) -> Iterator[None]:
    """The table says these. Kernels of few rows take more than they do otherwise."""
    with patch(f"{case.module}.{case.table}", lambda *_: entry_of(numbers)), ExitStack() as more:
        if case.table == "small_launch":
            more.enter_context(patch(f"{case.module}.MAX_SMALL_ROWS", 64))
        yield


@cache
def _inputs(name: str, device: torch.device) -> Inputs:
    return cases()[name].make(device, 1)


def compiled(task: tuple[str, tuple[int, ...], str]) -> tuple[str, tuple[int, ...], str]:
    """Computes once, in a process of its own, which leaves the kernel in the cache on disk. Returns why it cannot be
    used."""
    name, numbers, device = task
    case = cases()[name]
    try:
        inputs = _inputs(name, torch.device(device))
        with table_of(case, numbers):
            result = inputs.launch(0).float()
        error = float((result - inputs.expected.float()).norm() / inputs.expected.float().norm())
        return name, numbers, "" if error <= _TOLERANCE else f"{error:.1%} off"
    except Exception as error:  # noqa: BLE001 - an entry that does not compile or fit is no candidate
        return name, numbers, f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", help="beginnings of their names, with commas: rows-1,gated-16,decode")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="kernels compiled at once")


def measure(arguments: argparse.Namespace, report: Report) -> None:
    if not on_gpu(report.device):
        report.skip("launch parameters", "a processor has none")
        return
    wanted = tuple((arguments.cases or "").split(","))
    chosen = [case for name, case in cases().items() if name.startswith(wanted)]
    tasks = [(case.name, numbers, str(report.device)) for case in chosen for numbers in case.entries]
    good: dict[str, list[tuple[int, ...]]] = {case.name: [] for case in chosen}
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for name, numbers, problem in pool.imap_unordered(compiled, tasks):
            if problem:
                report.skip(f"{name} {numbers}", problem)
            else:
                good[name].append(numbers)
    lines = [line for case in chosen for line in _measure(report, case, sorted(good[case.name]))]
    print("\n".join(lines), flush=True)


def _measure(report: Report, case: Case, good: list[tuple[int, ...]]) -> list[str]:
    """The fastest, as lines."""
    inputs, found = case.make(report.device, _COPIES), []
    if inputs.peer is not None:
        run = captured(report.device, in_turn(inputs.peer, inputs.copies), inputs.copies)
        seconds = scaled(timed(report.device, {"torch": run}, _EFFORT), inputs.copies)["torch"]
        found.append((seconds.median, _shares(report.row(f"{case.name} torch", seconds, work=[inputs.work])), "torch"))
    as_it_is = [] if case.name.startswith("rows-64") else [None]
    for numbers in (*as_it_is, *good):
        what = f"{case.name} {'as it is' if numbers is None else numbers}"
        with report.case(what):
            with nullcontext() if numbers is None else table_of(case, numbers):
                run = captured(report.device, in_turn(inputs.launch, inputs.copies), inputs.copies)
            seconds = scaled(timed(report.device, {"ours": run}, _EFFORT), inputs.copies)["ours"]
            row = report.row(what, seconds, work=[inputs.work], inputs={"entry": numbers})
            found.append((seconds.median, _shares(row), "as it is" if numbers is None else str(numbers)))
    torch.cuda.empty_cache()
    shown = [line for line in found if line[2] in ("torch", "as it is")] + sorted(found)[:3]
    return [f"{case.name:26} {1e6 * seconds:8.1f} us {shares} {name}" for seconds, shares, name in shown]


def _shares(row: dict[str, Any]) -> str:
    """The shares of the floor at the burst and at the sustained rate."""
    return f"{row['of_floor']:5.2f} {row.get('of_sustained_floor', row['of_floor']):5.2f}"


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(__doc__, options, argv)
    device = torch.device(arguments.device)
    gc.freeze()  # each capture collects garbage
    known = ceilings.measure(device, torch.bfloat16, quick=arguments.quick, known=arguments.ceilings)
    print(ceilings.show(known), flush=True)
    with Report("launches", arguments, known) as report:
        measure(arguments, report)


if __name__ == "__main__":
    main()
