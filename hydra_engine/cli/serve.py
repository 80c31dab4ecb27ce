"""`hydra-engine serve MODEL`: the HTTP server in this process, the engine's instances in processes of their own."""

from __future__ import annotations

import argparse
import asyncio
import sys

from hydra_engine import log
from hydra_engine.cli.options import add_all_options, add_model_argument
from hydra_engine.cli.sources import read_settings
from hydra_engine.config import fault_points_enabled


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_all_options(parser)
    parser.epilog = (
        "Every flag is also a variable (--max-num-seqs: HYDRA_MAX_NUM_SEQS) and a key of the file that --config or "
        "HYDRA_CONFIG names (max-num-seqs: 8). Flags win over variables, these over the file. "
        "`hydra-engine config` prints what they lead to."
    )


def run(arguments: argparse.Namespace) -> int:
    # Imported here: only this command needs the server.
    from hydra_engine.cli.start_screen import screen_lines
    from hydra_engine.engine import Engine
    from hydra_engine.server.runner import serve

    settings = read_settings(arguments)
    config, server = settings.engine(), settings.server()
    log.configure(config.log_level, log_format=config.log_format)
    engine = Engine.unstarted(config)
    model_name = server.served_model_name or engine.model_name

    def announce(url: str) -> None:
        lines = screen_lines(engine.summaries, config, server, url=url, model_name=model_name)
        for line in (*lines, f"ready on {url}"):
            if config.log_format == "json":
                log.tell(line.strip())
            else:
                sys.stderr.write(line + "\n")
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
            log_level=config.log_level,
            log_format=config.log_format,
        )
    )
