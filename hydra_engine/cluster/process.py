"""Entry point of an instance process: `python -m hydra_engine.cluster.process --fd N`, started by the supervisor.

Takes its configuration from the inherited socket, ignores the signals that a terminal or a service manager sends to
the whole group (draining is the front's business), and ends when the front asks or is gone.
"""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys

from hydra_engine import log
from hydra_engine.cluster.channel import InstanceSocket
from hydra_engine.core.messages import WIRE_VERSION, Failed
from hydra_engine.errors import ConfigError, HydraError
from hydra_engine.instance import build

logger = logging.getLogger(__name__)


def main() -> int:
    parser = argparse.ArgumentParser(description="internal: one instance of hydra-engine")
    parser.add_argument("--fd", type=int, required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end = InstanceSocket(socket.socket(fileno=arguments.fd))
    start = end.receive_start()
    log.configure(start.config.log_level, instance=start.name)
    if start.version != WIRE_VERSION:
        error: HydraError = ConfigError(f"the front speaks wire version {start.version}, not {WIRE_VERSION}")
        end.send([Failed(error.info(), error.exit_code)])
        return error.exit_code
    end.start_reading()
    code = build.run_instance(start.config, start.name, end, end, end.wake)
    end.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
