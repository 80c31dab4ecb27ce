"""The stand-in of `tests/cluster/stand_in.py` as an instance process on a node."""

from __future__ import annotations

import sys

from hydra_nodes.process import main
from tests.cluster.stand_in import load

COMMAND = (sys.executable, "-m", "tests.nodes.stand_in")

if __name__ == "__main__":
    sys.exit(main(load))
