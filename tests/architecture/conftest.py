"""Settings of the tests of this folder."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.architecture import sources


@pytest.fixture(scope="package", autouse=True)
def parsed_sources() -> Iterator[None]:
    """Keeps the collector away from a million nodes of syntax trees, and drops them after the last test."""
    gc.disable()
    yield
    for cached in (sources.text_of, sources.tree_of, sources.nodes_of):
        cached.cache_clear()
    gc.enable()
