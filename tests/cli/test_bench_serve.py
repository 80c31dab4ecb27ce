"""`hydra-engine bench serve` against a real server on the demo model."""

from __future__ import annotations

import pytest

from tests.cli.conftest import KEY, Here, Started


@pytest.mark.slow
def test_a_load_on_a_server_that_asks_for_a_key(server: Started, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    load = ("bench", "serve", "--url", server.url, "--num-prompts", "4", "--request-rate", "40", "--images", "1")
    load = (*load, "--input-len", "8", "--output-len", "5", "--image-size", "32x32")
    monkeypatch.delenv("HYDRA_API_KEY", raising=False)
    refused = here(*load)
    assert refused.returncode == 4 and refused.stderr.endswith("as OpenAI's: HTTP 401, Unauthorized\n")
    monkeypatch.setenv("HYDRA_API_KEY", KEY)
    done = here(*load)
    assert done.returncode == 0 and not done.stderr, done.stderr
    figures = dict(line.rsplit(maxsplit=1) for line in done.stdout.splitlines() if ":" in line)
    assert figures["Successful requests:"] == "4" and figures["Total generated tokens:"] == "20"
    assert figures["Request rate configured (RPS):"] == "40.00" and float(figures["P99 TTFT (ms):"]) > 0
