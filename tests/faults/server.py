"""`python -m tests.faults.server serve MODEL ...` is `hydra-engine serve MODEL ...` with the route /debug/ledger."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from aiohttp import web

from hydra_engine.__main__ import main
from hydra_engine.server import runner
from hydra_engine.server.state import ENGINE

# Arguments of `serve` follow.
COMMAND = (sys.executable, "-m", "tests.faults.server", "serve", "demo", "--port", "0", "--threads", "1")


async def show_ledger(request: web.Request) -> web.Response:
    """The blocks and requests that the instances hold now."""
    report = await request.app[ENGINE].aledger()  # type: ignore[attr-defined]
    fields = {name: getattr(report, name) for name in report.__struct_fields__ if name != "query_id"}
    return web.json_response({**fields, "at_rest": report.at_rest})


def with_ledger(build: Callable[..., web.Application]) -> Callable[..., web.Application]:
    def build_with_ledger(*arguments: Any, **options: Any) -> web.Application:
        app = build(*arguments, **options)
        app.router.add_get("/debug/ledger", show_ledger)
        return app

    return build_with_ledger


if __name__ == "__main__":
    runner.build_app = with_ledger(runner.build_app)
    sys.exit(main())
