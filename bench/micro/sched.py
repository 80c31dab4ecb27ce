"""Times what a step costs the processor besides computing: `bench.sched` as a micro-benchmark.

A row per scenario: the loop's turn (plan, take back the result, tell the frontend) and the lane's metadata, one after
the other, as between two steps without look-ahead. `python -m bench.sched` has more scenarios and columns.
"""

from __future__ import annotations

from statistics import median

import torch

from bench.micro.harness import Report, Seconds, parse
from bench.sched import SCENARIOS, Bench

COLUMNS = ("plan", "take_back", "turn", "metadata")
_QUICK_WAITING = 512  # at most


def main() -> None:
    arguments = parse(__doc__)
    arguments.device = "cpu"
    torch.set_num_threads(arguments.threads or 1)
    steps = 60 if arguments.quick else 400
    with Report("sched", arguments) as report:
        for scenario in SCENARIOS:
            if arguments.quick and scenario.waiting > _QUICK_WAITING:
                continue
            samples = Bench(scenario, steps).samples(steps)
            seconds = Seconds.of(samples["exposed"])
            parts = {f"{name}_us": median(samples[name]) * 1e6 for name in COLUMNS}
            inputs = {"running": scenario.running, "waiting": scenario.waiting, "output": scenario.output}
            report.row(scenario.name, seconds, inputs=inputs, us=seconds.median * 1e6, **parts)


if __name__ == "__main__":
    main()
