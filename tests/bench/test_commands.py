"""Benchmarks that no other test runs, from their own command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO = ("--model", "demo", "--threads", "1")
COMMANDS = {
    "accuracy": ("hydra_engine/demo/model", "int8", "--text", "README.md"),
    "families": ("--quick",),
    "lanes": ("--requests", "4", *DEMO),
    "micro.attn_prefill": ("--quick", "--threads", "1"),
    "micro.encode": ("--quick", *DEMO),
    "micro.launches": ("--quick",),
    "micro.layer": ("--quick", *DEMO),
    "micro.prefill": ("--quick", *DEMO),
    "micro.products": ("--quick", *DEMO),
    "micro.quantized": ("--quick", *DEMO),
    "micro.step_parts": ("--quick", "--rows", "2", "--sampling", "greedy,drawn,penalties,logprobs", *DEMO),
    "ops.attention": ("--quick",),
    "ops.cache": ("--quick",),
    "ops.linear": ("--quick",),
    "scale": ("--quick",),
    "outliers": ("--kinds", "int8", "--powers", "0", "--seconds", "0.1"),
    "preprocess": ("--quick",),
    "ready": ("hydra_engine/demo/model", "--rounds", "1"),
    "stages": ("--quick", *DEMO),
    "throughput": ("--quick", *DEMO),
}


@pytest.mark.drawn
@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_it_ends_with_a_document(name: str) -> None:
    command = [sys.executable, "-m", f"bench.{name}", *COMMANDS[name]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert {"cpu", "isa", "torch", "commit", "command"} <= set(document.get("card", document))
    assert not document.get("failed") and not document.get("wrong")


@pytest.mark.slow
def test_documents_are_written_into_new_folders(tmp_path: Path) -> None:
    path = tmp_path / "of" / "today" / "stages.json"
    command = [sys.executable, "-m", "bench.stages", "--quick", *DEMO, "--batches", "1", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text()) == json.loads(done.stdout.splitlines()[-1])
