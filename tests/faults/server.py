"""`python -m tests.faults.server serve MODEL ...` is `hydra-engine serve MODEL ...` with the route /debug/ledger."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hydra_engine.__main__ import main
from hydra_engine.server import runner

# Arguments of `serve` follow.
COMMAND = (sys.executable, "-m", "tests.faults.server", "serve", "demo", "--port", "0", "--threads", "1")


def with_ledger(build: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **options: build(*arguments, **(options | {"debug_endpoints": True}))


if __name__ == "__main__":
    runner.build_app = with_ledger(runner.build_app)
    sys.exit(main())
