"""One-time logging set-up. Every module logs through `logging.getLogger(__name__)`; only entry points call this.

Lines carry the instance's name so that the logs of several processes can be read side by side.
"""

from __future__ import annotations

import logging
import sys

_FORMAT = "%(asctime)s %(levelname).1s [{instance}] %(name)s: %(message)s"


def configure(level: str = "info", *, instance: str = "front") -> None:
    """Sends the package's log to standard error; a second call replaces the first."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT.format(instance=instance), "%H:%M:%S"))
    root = logging.getLogger("hydra_engine")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
    # A full disk or a closed pipe must not take the server down: lines are dropped, serving goes on.
    logging.raiseExceptions = False
