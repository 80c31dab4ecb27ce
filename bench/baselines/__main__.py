"""The server of a baseline: the real one, whose instance is another."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import replace

import bench.baselines
from bench.baselines import NAMES
from bench.baselines.instance import COMMAND, VARIABLE
from hydra_engine.cli.serve import add_options
from hydra_engine.cli.sources import read_settings
from hydra_engine.cluster.supervisor import Supervisor
from hydra_engine.engine import Engine
from hydra_engine.frontend.frontend import Frontend
from hydra_engine.server.runner import serve


class BaselineEngine(Engine):
    async def _start(self, progress: bool | None, tell: Callable[[str], None] | None = None) -> None:
        supervisor = Supervisor(self.config, processes=True, command=COMMAND)
        self._frontend = Frontend(self.config, processes=True, supervisor=supervisor, defaults=self._defaults)
        await self._frontend.start(lambda _loading: None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.baselines", description=bench.baselines.__doc__)
    parser.add_argument("baseline", choices=NAMES, help="; ".join(f"{name}: {text}" for name, text in NAMES.items()))
    add_options(parser)
    arguments = parser.parse_args()
    os.environ[VARIABLE] = arguments.baseline
    settings = read_settings(arguments)
    config = settings.engine()
    # Its steps take other times than ours.
    config = replace(config, profile_dir=str(config.profile_folder / arguments.baseline))
    engine = BaselineEngine.create_unstarted(config)

    def announce(url: str) -> None:
        sys.stderr.write(f"ready on {url}\n")

    return asyncio.run(serve(engine, settings.server(), start=engine.astart, stop=engine.aclose, ready=announce))


if __name__ == "__main__":
    sys.exit(main())
