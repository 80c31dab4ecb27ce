"""The instance of a baseline: ours, with another scheduler or worker. Which one says the variable BENCH_BASELINE.

Started by the supervisor as a real one is.
"""

from __future__ import annotations

import os
import sys
from functools import partial

from hydra_engine.cluster.process import RunInstance, load_instance, main

COMMAND = (sys.executable, "-m", "bench.baselines.instance")
VARIABLE = "BENCH_BASELINE"


def load() -> RunInstance:
    run = load_instance()
    from bench.baselines.worker import UnslicedWorker
    from hydra_planner.simulator.schedules import OneLaneScheduler, RequestScheduler

    match os.environ[VARIABLE]:
        case "request-level":
            return partial(run, scheduler_class=RequestScheduler)
        case "one-lane":
            return partial(run, scheduler_class=OneLaneScheduler)
        case "unsliced":
            return partial(run, worker_class=UnslicedWorker)
        case name:
            raise ValueError(f"no baseline is called {name!r}")


if __name__ == "__main__":
    sys.exit(main(load))
