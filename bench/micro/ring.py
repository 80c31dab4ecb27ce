"""Read rate over the number of multiprocessors that read, with 48, 96 and 192 KB in flight on each of them.

A block to a multiprocessor reads through a ring of bulk copies (`ring_read.cu`), and the hardware spreads blocks over
the device: nothing is divided. What few of them read decides how much of a device decodes need beside other work.
`gb_per_s_sm` is the rate of each. GPUs of compute capability 9.0 with an nvcc; floors only with `--ceilings`.
`hydra-engine bench ring [--gib 2]`.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

from bench.micro.ceilings import read_known
from bench.micro.floors import Work
from bench.micro.harness import Effort, Report, parse, timed
from bench.micro.machine import on_gpu
from bench.micro.ring_reader import ring_read, usable

COUNTS = (1, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112)  # multiprocessors; and all
_EFFORT = Effort(3, 0.0, 1.0)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gib", type=float, default=2.0, help="that are read each time")


def counts_of(total: int) -> list[int]:
    return [*(count for count in COUNTS if count < total), total]


def measure_all(arguments: argparse.Namespace, report: Report) -> None:
    if not on_gpu(report.device):
        report.skip("reads through a ring", "a processor reads by itself: bench.micro.ceilings has its rate")
        return
    total = torch.cuda.get_device_properties(report.device).multi_processor_count
    num_words = max(4, int(arguments.gib * (1 << 30)) // 16 * 4)
    words = torch.randint(-(1 << 31), 1 << 31, (num_words,), dtype=torch.int32, device=report.device)
    work = [] if report.ceilings is None else [Work("read", read_bytes=4 * num_words)]
    rings, problem = usable(words, total)
    if problem:
        report.skip("reads through a ring", problem)
    for held in rings:
        for count in counts_of(total):
            what = f"read with {held} KB in flight on {count} of {total} SMs"
            with report.case(what):
                seconds = timed(report.device, {"ring": partial(ring_read, words, count, held)}, _EFFORT)["ring"]
                rate = 4 * num_words / seconds.median / 1e9
                inputs = {"sms": count, "of_sms": total, "held_kib": held}
                report.row(what, seconds, work=work, inputs=inputs, gb_per_s=rate, gb_per_s_sm=rate / count)
                print(f"{'':60}{rate:.0f} GB/s, {rate / count:.1f} of each")


def main() -> None:
    arguments = parse(__doc__, options)
    device = torch.device(arguments.device)
    if on_gpu(device):
        torch.cuda.set_device(device)
    with torch.inference_mode():
        ceilings = None if arguments.ceilings is None else read_known(arguments.ceilings, device, torch.bfloat16)
        with Report("ring", arguments, ceilings) as report:
            measure_all(arguments, report)


if __name__ == "__main__":
    main()
