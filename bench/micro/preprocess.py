"""Times the way from a JPEG's bytes to a tower's pixels: `bench.preprocess` as a micro-benchmark.

A row per size and target: processor seconds of all that the frontend does, through the decode child, next to
transformers' processors in the same run. Pixels are compared before anything is timed.
"""

from __future__ import annotations

import torch

from bench.common import Times
from bench.micro.harness import Report, Seconds, parse
from bench.preprocess import SIZES, TARGETS, prepare, timed
from hydra_engine.preprocess.media.opening import Decoders


def main() -> None:
    arguments = parse(__doc__)
    arguments.device = "cpu"
    torch.set_num_threads(1)
    decoders = Decoders()
    repeats = 5 if arguments.quick else 15
    try:
        with Report("preprocess", arguments) as report:
            for width, height in SIZES[:1] if arguments.quick else SIZES:
                for target in TARGETS:
                    case = prepare(target, (width, height), decoders)
                    times = {name: seconds_of(value) for name, value in timed(case, decoders, repeats).items()}
                    report.row(
                        f"{width} x {height}, {target.name}",
                        times["served"],
                        inputs={"width": width, "height": height, "file_bytes": case.file_bytes},
                        peers={"transformers": times["transformers"]},
                        ms=times["served"].median * 1e3,
                        in_process_ms=times["in process"].median * 1e3,
                        decode_ms=times["decode"].median * 1e3,
                        resize_ms=times["resize"].median * 1e3,
                        grey_levels_off=case.grey_levels_off,
                    )
    finally:
        decoders.close()


def seconds_of(times: Times) -> Seconds:
    return Seconds.of(times.turns)


if __name__ == "__main__":
    main()
