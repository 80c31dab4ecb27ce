"""`python -m tests.faults.instance` is `hydra_engine.cluster.process` with fault points."""

from __future__ import annotations

import sys
from importlib import import_module

from hydra_engine.cluster.process import RunInstance, load_instance, main


def load() -> RunInstance:
    load_instance()
    run: RunInstance = import_module("tests.faults.run").run_instance
    return run


if __name__ == "__main__":
    sys.exit(main(load))
