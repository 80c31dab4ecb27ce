"""`hydra-engine serve MODEL`: the HTTP server in this process, each engine instance in its own process."""

from __future__ import annotations

import argparse
import resource
import sys
from functools import partial
from typing import TYPE_CHECKING

from hydra_engine import log
from hydra_engine.cli.options import add_all_options, add_model_argument
from hydra_engine.cli.sources import read_settings
from hydra_engine.config import EngineConfig, ServerConfig
from hydra_engine.core.options import NATIVE
from hydra_engine.preprocess.model_files import find_model_files

if TYPE_CHECKING:
    from hydra_engine.cluster.launcher import Ahead
    from hydra_engine.core.processes.preloaded import Preloaded


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_all_options(parser)
    parser.epilog = (
        "Every flag is also a variable (--max-num-seqs: HYDRA_MAX_NUM_SEQS) and a key of the file that --config or "
        "HYDRA_CONFIG names (max-num-seqs: 8). Flags win over variables, these over the file. "
        "`hydra-engine config` prints the result."
    )


def run(arguments: argparse.Namespace) -> int:
    settings = read_settings(arguments)
    return start(find_model_files(settings.engine()), settings.server())


def start(config: EngineConfig, server: ServerConfig) -> int:
    """Serves until it is stopped; returns the exit code. `config` comes from `find_model_files`."""
    log.never_wait()
    _raise_descriptor_limit()
    # Imported here: other commands do not need these, and errors of the configuration come before the imports.
    from hydra_engine.cluster.spawn import COMMAND, Spawned, preload, spawn
    from hydra_engine.core.processes.privacy import forbid_access_by_others
    from hydra_engine.models.specs.registry import modules_to_preload

    if server.api_key or server.api_key_file or server.admin_key:
        forbid_access_by_others()

    # Instances, or the process that they are forks of, load torch during the imports below.
    ahead: dict[str, Spawned] = {}
    preloaded = preload(modules_to_preload(config.model_impl))
    try:
        # Others may be forks of one process, or run elsewhere.
        if config.model_impl in NATIVE and config.cluster.launcher is None:
            for name in config.parsed_topology.names:
                ahead[name] = spawn(COMMAND, name)
        return _serve(config, server, ahead, preloaded)
    finally:
        for spawned in ahead.values():
            spawned.discard()
        if preloaded is not None:
            preloaded.close()


def _raise_descriptor_limit() -> None:
    """Raises the soft limit of open files to the hard one; child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS takes no infinity
        log.log_always(f"at most {soft} files can be open at once: {error}")


def _serve(config: EngineConfig, server: ServerConfig, ahead: Ahead, preloaded: Preloaded | None) -> int:
    import asyncio

    from hydra_engine.cli.summary import screen_lines
    from hydra_engine.engine import Engine
    from hydra_engine.server.runner import serve

    log.configure(config.log_level, log_format=config.log_format)
    engine = Engine.create_unstarted(config, ahead, preloaded)
    model_name = server.served_model_name or engine.model_name

    def announce(url: str) -> None:
        lines = screen_lines(
            engine.summaries, config, server, engine.default_sampling_params, url=url, model_name=model_name
        )
        for line in (*lines, f"ready on {url}"):
            if config.log_format == "json":
                log.log_always(line.strip())
            else:
                sys.stderr.write(line + "\n")

    return asyncio.run(
        serve(
            engine,
            server,
            start=partial(engine.astart, tell=log.log_always),
            stop=engine.aclose,
            ready=announce,
            model_name=server.served_model_name,
        )
    )
