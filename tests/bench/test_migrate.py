"""The bench of block moves, from the command line to the document: two processes, every block checked on its way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_blocks_move_between_two_processes_and_are_accounted_for(tmp_path: Path) -> None:
    path = tmp_path / "migrate.json"
    sizes = ["--blocks", "4", "--block-kib", "32", "--rounds", "2", "--round-trips", "20"]
    command = [sys.executable, "-m", "bench.migrate", *sizes, "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    document = json.loads(path.read_text())
    assert document == json.loads(done.stdout.splitlines()[-1])
    moved = [(row["pool"], row["blocks"], row["bytes"]) for row in document["results"]]
    assert moved == [
        ("kv", 1, 32 << 10),
        ("kv", 4, 128 << 10),
        ("features", 1, 64 * 3584 * 2),
        ("features", 4, 4 * 64 * 3584 * 2),
    ]
    assert all(row["ratio"] > 0 and row["whole_us"] > row["job_us"] > 0 for row in document["results"])
    assert document["round_trip_us"]["p95"] >= document["round_trip_us"]["p50"] > 0
