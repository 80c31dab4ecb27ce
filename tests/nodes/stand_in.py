"""The stand-in of `tests/cluster/stand_in.py` as an instance process on a node, without its clock and its
network."""

from __future__ import annotations

import sys
from typing import Any

from hydra_engine.clock import Clock
from hydra_engine.transfer.network import BlockNetwork
from hydra_nodes.process import main
from tests.cluster.stand_in import run_instance

COMMAND = (sys.executable, "-m", "tests.nodes.stand_in")


def run_without(*arguments: Any, clock: Clock, network: BlockNetwork, **options: Any) -> int:
    network.close()
    return run_instance(*arguments, **options)


if __name__ == "__main__":
    sys.exit(main(lambda: run_without))
