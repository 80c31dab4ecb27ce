"""Tests of the endpoints, once more through a front worker's relay: what clients see must not change with it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from types import ModuleType

import pytest

from tests.server import (
    test_admin,
    test_cancel,
    test_chat,
    test_completions,
    test_errors,
    test_forwarding,
    test_health,
    test_info,
    test_messages,
    test_page,
    test_requests,
    test_responses,
)
from tests.server.conftest import Served
from tests.server.relayed import Serve, serving

MODULES: tuple[ModuleType, ...] = (
    test_admin,
    test_cancel,
    test_chat,
    test_completions,
    test_errors,
    test_forwarding,
    test_health,
    test_info,
    test_messages,
    test_page,
    test_requests,
    test_responses,
)
# The scripted engine gives a piece when it is asked for one; behind the relay it has ended before a reader is slow.
NOT_HERE = frozenset({"test_a_slow_reader_is_cut_off", "test_others_stream_on_while_one_does_not_read"})


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    closers: list[Callable[[], Awaitable[None]]] = []
    yield serving(closers)
    for close in closers:
        await close()


@pytest.fixture
async def served(serve: Serve) -> Served:
    return await serve()


def _needs_a_server(test: object) -> bool:
    names = test.__code__.co_varnames[: test.__code__.co_argcount]
    return bool({"serve", "served", "governed", "stub"} & set(names))


for _module in MODULES:
    for _name, _value in vars(_module).items():
        if _name.startswith("test_") and _name not in NOT_HERE and _needs_a_server(_value):
            globals()[f"{_name}__{_module.__name__.rpartition('_')[2]}"] = _value
        elif type(_value).__name__ == "FixtureFunctionDefinition" and _name not in ("serve", "served"):
            globals()[_name] = _value
