"""An instance under siege: `hydra_engine.cluster.process`, with a record of the turns that it gives."""

from __future__ import annotations

import sys

from bench.siege import turn_log
from hydra_engine.cluster.process import main

if __name__ == "__main__":
    turn_log.watch_to_file()
    sys.exit(main())
