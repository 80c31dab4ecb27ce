"""`hydra-engine serve MODEL`: the HTTP server in this process, the engine's instance in one of its own."""

from __future__ import annotations

import argparse
import asyncio
import sys

from hydra_engine import log
from hydra_engine.cli.options import add_engine_options, add_server_options, engine_config_from, server_config_from
from hydra_engine.cli.summary import start_lines
from hydra_engine.config import DEMO_MODEL, fault_points_enabled


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEMO_MODEL, help="Hugging Face model directory, or `demo`")
    add_server_options(parser)
    add_engine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    # Imported here: only this command needs the server.
    from hydra_engine.engine import Engine
    from hydra_engine.server.runner import serve

    config = engine_config_from(arguments, arguments.model)
    server = server_config_from(arguments)
    log.configure(config.log_level)
    engine = Engine.unstarted(config)

    def announce(url: str) -> None:
        for line in start_lines(engine.summaries):
            sys.stderr.write(line + "\n")
        sys.stderr.write(f"ready on {url}\n")
        sys.stderr.flush()

    return asyncio.run(
        serve(
            engine,
            server,
            start=engine.astart,
            stop=engine.aclose,
            ready=announce,
            model_name=server.served_model_name,
            debug_endpoints=fault_points_enabled(),
        )
    )
