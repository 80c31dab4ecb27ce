"""A start that is measured, and one that fails."""

from __future__ import annotations

import pytest

from bench.common import ROOT
from bench.ready import start


def test_a_server_that_does_not_start_is_shown_with_its_reason() -> None:
    with pytest.raises(RuntimeError, match=r"did not start:\n.*/no/such/model"):
        start(ROOT, ["/no/such/model"])


@pytest.mark.slow
def test_a_start_is_measured() -> None:
    taken = start(ROOT, ["demo", "--threads", "1", "--kv-cache-gib", "0.1"])
    assert 0 <= taken.loaded_s < taken.ready_s and taken.user_s > 0, "the summary has tenths of a second"
    assert taken.peak_bytes > 30 << 20, "as much as any Python of ours"
    assert 1 << 20 < taken.weights_bytes < taken.peak_bytes
