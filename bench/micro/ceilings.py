"""Ceilings of this machine with nothing else to do: matrix products, copies, reads, and the gap between two kernels.

Every other micro-benchmark measures a short form of this first, because boards and clocks differ from run to run and
only ratios to the same run mean something. On a GPU with green contexts, matrix products and reads are also measured on
parts of its multiprocessors. The reader is a ring of bulk copies where it can be compiled (`ring_reader.py`), which
keeps as much in flight as a multiprocessor holds, and torch's sum elsewhere. `hydra-engine bench ceilings [--full]`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bench.micro.floors import Ceilings, Work
from bench.micro.harness import Effort, Report, Run, Seconds, captured, parse, require, scaled, timed
from bench.micro.machine import on_gpu
from bench.micro.ring_reader import ring_read, usable
from hydra_engine.backend.cuda.sm_split import create_split_streams
from hydra_engine.errors import HydraError

_SM_STEP = 8  # partitions of compute capability 9.0 are multiples of this
QUICK_COUNTS = (16, 32, 48, 64, 96)
SPREAD = ", spread"  # every second group of them instead of groups that lie together


class Sizes(NamedTuple):
    gemm: tuple[int, int, int]  # rows, outputs, inputs
    stream_bytes: int  # of what is read or copied
    sustained_s: float


_GPU = Sizes((8192, 8192, 8192), 4 << 30, 2.0)
_CPU = Sizes((1024, 4096, 1024), 1 << 28, 0.0)


def sizes_of(device: torch.device, quick: bool) -> Sizes:
    if on_gpu(device):
        return _GPU._replace(stream_bytes=_GPU.stream_bytes // 2) if quick else _GPU
    return _CPU if quick else _CPU._replace(sustained_s=2.0)


class Machine:
    """The operands of all measurements on one device: random, so that the device draws as much power as for a model."""

    def __init__(self, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> None:
        self.device, self.dtype, self.sizes = device, dtype, sizes
        rows, outputs, inputs = sizes.gemm
        self._x = torch.randn((rows, inputs), dtype=dtype, device=device)
        self._weight = torch.randn((outputs, inputs), dtype=dtype, device=device)
        self._out = torch.empty((rows, outputs), dtype=dtype, device=device)
        self._words = torch.rand(sizes.stream_bytes // 4, dtype=torch.float32, device=device)
        self._half = len(self._words) // 2
        exact = self._x[:16].double() @ self._weight.double().T
        self.gemm()
        error = float((self._out[:16].double() - exact).abs().max())
        require(error <= 0.02 * float(exact.abs().max()), "the matrix product of the ceilings")

    @property
    def flops(self) -> float:
        rows, outputs, inputs = self.sizes.gemm
        return 2.0 * rows * outputs * inputs

    @property
    def read_bytes(self) -> int:
        return 4 * len(self._words)

    @property
    def moved_bytes(self) -> int:
        """Read and written by `copy`."""
        return 2 * 4 * self._half

    def gemm(self) -> Tensor:
        return torch.mm(self._x, self._weight.T, out=self._out)

    def copy(self) -> Tensor:
        return self._words[: self._half].copy_(self._words[self._half : 2 * self._half])

    def reads(self, *, through_rings: bool) -> dict[str, Run]:
        """Several ways to read everything once: the best of them is the ceiling."""
        words = self._words
        found: dict[str, Run] = {"sum": lambda: words.sum(), "sum of int64": lambda: words.view(torch.int64).sum()}
        if through_rings and on_gpu(self.device):
            for held in self.rings:
                found[f"{held} KB in flight"] = partial(self.ring, self.num_sms, held)
        return found

    def ring(self, num_sms: int, held_kib: int) -> Tensor:
        """Everything once, by so many multiprocessors."""
        return ring_read(self._words.view(torch.int32), num_sms, held_kib)

    @cached_property
    def num_sms(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    @cached_property
    def _usable(self) -> tuple[list[int], str]:
        return usable(self._words.view(torch.int32), self.num_sms)

    @property
    def rings(self) -> list[int]:
        """KB in flight on a multiprocessor with which this device reads, ascending."""
        return self._usable[0]

    @property
    def no_ring(self) -> str:
        """The reason why some ceilings are missing, a sentence."""
        return self._usable[1]

    def sustained_flops(self) -> float:
        """Sustained rate of matrix products: the median of the second half of `sustained_s`, when clocks have
        settled at the power cap."""
        rates: list[float] = []
        began = time.perf_counter()
        while (elapsed := time.perf_counter() - began) < self.sizes.sustained_s:
            seconds = timed(self.device, {"gemm": self.gemm}, Effort(3, 0.05, 1.0))["gemm"].median
            if elapsed > self.sizes.sustained_s / 2:
                rates.append(self.flops / seconds)
        return sorted(rates)[len(rates) // 2]

    def small_kernels(self, count: int) -> dict[str, Run]:
        """`count` kernels that do next to nothing, each after the one before it: from Python, in a graph, and in a
        graph where the next one may start while its predecessor ends."""
        from bench.micro.probe_kernels import dependent_add

        x = torch.zeros(1, device=self.device)

        def eager() -> None:
            for _ in range(count):
                x.add_(1.0)

        launches = {"launch": eager, "graph": captured(self.device, lambda: x.add_(1.0), count)}
        if torch.cuda.get_device_capability(self.device) >= (9, 0):
            y = torch.zeros(1, device=self.device)
            launches["graph, dependent launch"] = captured(self.device, lambda: dependent_add(y), count)
        return launches


def measure(device: torch.device, dtype: torch.dtype, *, quick: bool, known: Path | None = None) -> Ceilings:
    """The short form, a few seconds: rates of the fastest turns, reads by torch's sums alone, which need no compiler.
    With `quick` nothing is sustained on a processor. `known` is a document of this benchmark: if it is whole and of
    this device and dtype, its ceilings are taken."""
    if known is not None and (found := read_known(known, device, dtype)) is not None:
        return found
    ceilings, _ = _measure(Machine(device, dtype, sizes_of(device, quick)), quick, through_rings=False)
    return ceilings


def read_known(path: Path, device: torch.device, dtype: torch.dtype) -> Ceilings | None:
    """The ceilings of a document of this benchmark; None if it is absent, not whole, or of another device or dtype."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    same = document.get("dtype") == str(dtype) and document["card"].get("device") == str(device)
    return Ceilings(**document["ceilings"]) if same and document.get("complete") else None


def _measure(machine: Machine, quick: bool, *, through_rings: bool) -> tuple[Ceilings, dict[str, Seconds]]:
    effort = Effort(7, 0.01, 2.0) if quick else Effort(15, 0.02, 4.0)
    runs: dict[str, Run] = {"gemm": machine.gemm, "copy": machine.copy}
    seconds = timed(
        machine.device,
        runs | {f"read, {name}": run for name, run in machine.reads(through_rings=through_rings).items()},
        effort,
    )
    gap = launch = None
    if on_gpu(machine.device):
        count = 200
        small = scaled(timed(machine.device, machine.small_kernels(count), effort), count)
        seconds |= small
        gap, launch = small["graph"].median, small["launch"].median
    fastest = min(value.p5 for name, value in seconds.items() if name.startswith("read"))
    ceilings = Ceilings(
        gemm_flops_per_s=machine.flops / seconds["gemm"].p5,
        read_bytes_per_s=machine.read_bytes / fastest,
        copy_bytes_per_s=machine.moved_bytes / seconds["copy"].p5,
        sustained_flops_per_s=machine.sustained_flops() if machine.sizes.sustained_s else None,
        graph_gap_s=gap,
        launch_s=launch,
    )
    return ceilings, seconds


def sweep(report: Report, machine: Machine) -> None:
    """Matrix products and reads on 8, 16, .. multiprocessors, on the streams that the engine divides a device by: how
    many of them a memory-bound step needs, and whether it matters which ones."""
    total = machine.num_sms
    counts = QUICK_COUNTS if report.quick else range(_SM_STEP, total - _SM_STEP + 1, _SM_STEP)
    if machine.no_ring:
        report.skip("reads through a ring", machine.no_ring + ("" if machine.rings else "; torch's sum reads instead"))
    for count, spread in itertools.product(counts, (False, True)):
        try:
            ((handle, _, found, _),) = create_split_streams(machine.device, (count,), 0, 0, spread=spread)
        except HydraError as error:  # the driver cannot divide, or the device not so
            report.skip(f"{count} SMs{SPREAD if spread else ''}", error.message)
            continue
        _on_part(report, machine, torch.cuda.ExternalStream(handle, device=machine.device), found, spread)


def _on_part(report: Report, machine: Machine, part: torch.cuda.Stream, found: int, spread: bool) -> None:
    total, read = machine.num_sms, machine.reads(through_rings=False)["sum of int64"]
    if machine.rings:
        read = partial(machine.ring, found, machine.rings[-1])
    part.wait_stream(torch.cuda.current_stream(machine.device))
    with torch.cuda.stream(part):
        seconds = timed(machine.device, {"gemm": machine.gemm, "read": read}, Effort(3, 0.005, 0.5))
    work = {"gemm": Work("gemm", machine.flops), "read": Work("read", read_bytes=machine.read_bytes)}
    for name, part_of in work.items():
        inputs = {"sms": found, "of_sms": total, "spread": spread}
        report.row(
            f"{name} on {found} of {total} SMs{SPREAD if spread else ''}", seconds[name], work=[part_of], inputs=inputs
        )


def main() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")

    arguments = parse(__doc__, add)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    if on_gpu(device):
        torch.cuda.set_device(device)
    with torch.inference_mode():
        machine = Machine(device, dtype, sizes_of(device, arguments.quick))
        ceilings, seconds = _measure(machine, arguments.quick, through_rings=True)
        with Report("ceilings", arguments, ceilings) as report:
            report.note("dtype", str(dtype))
            work = {"gemm": Work("gemm", machine.flops), "copy": Work("copy", moved_bytes=machine.moved_bytes)}
            for name, value in seconds.items():
                read = Work("read", read_bytes=machine.read_bytes) if name.startswith("read") else None
                part = work.get(name, read)
                report.row(name, value, work=[] if part is None else [part])
            if on_gpu(device):
                sweep(report, machine)
            elif dtype != torch.float32:
                wide = Machine(device, torch.float32, machine.sizes)
                gemm = timed(device, {"gemm": wide.gemm}, report.effort)["gemm"]
                report.row("gemm in float32", gemm, work=[Work("gemm", wide.flops)])
            print(show(ceilings))


def show(ceilings: Ceilings) -> str:
    text = f"ceilings here: {ceilings.gemm_flops_per_s / 1e12:.3g} TFLOP/s"
    if ceilings.sustained_flops_per_s is not None:
        text += f" ({ceilings.sustained_flops_per_s / 1e12:.3g} sustained)"
    text += f", {ceilings.read_bytes_per_s / 1e9:.4g} GB/s read, {ceilings.copy_bytes_per_s / 1e9:.4g} GB/s copied"
    if ceilings.graph_gap_s is not None:
        text += f", {ceilings.graph_gap_s * 1e6:.2f} us from kernel to kernel in a graph"
    return text


if __name__ == "__main__":
    main()
