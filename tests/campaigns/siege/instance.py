"""An instance under siege: `hydra_engine.cluster.process`, with a record of the turns that it gives."""

from __future__ import annotations

import sys

from hydra_engine.cluster.process import main
from tests.campaigns.siege import turn_log

if __name__ == "__main__":
    turn_log.watch_to_file()
    sys.exit(main())
