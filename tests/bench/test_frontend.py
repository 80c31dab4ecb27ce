"""The bench of the front, from the command line to the document: three servers, every token of every stream counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_server_streams_all_tokens_to_all_clients(tmp_path: Path) -> None:
    path = tmp_path / "frontend.json"
    sizes = ["--streams", "6", "--tokens", "40", "--step-ms", "10", "--rounds", "1"]
    command = [sys.executable, "-m", "bench.frontend", *sizes, "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    document = json.loads(path.read_text())
    assert document == json.loads(done.stdout.splitlines()[-1])
    assert list(document["medians"]) == ["front", "naive", "socket"]
    for row in document["medians"].values():
        assert 6 * 10 < row["tokens"] < 6 * 40
        assert row["us_per_token"] >= row["user_us_per_token"] >= 0 and row["us_per_token"] > 0
        assert row["first_byte_p99_ms"] >= row["first_byte_p50_ms"] > 0
    assert document["ratio_to"]["front"] == 1.0
