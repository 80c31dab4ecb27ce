"""Faults of nodes and of their network, over Ray on three hosts of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaigns.hosts import ROOT, find_obstacle
from tools import ray_environment


@pytest.mark.slow
@pytest.mark.timeout(1500)  # seven faults, after each of which Ray and instances start again
def test_each_request_is_answered_as_by_one_instance_or_refused_in_time(tmp_path: Path) -> None:
    if obstacle := find_obstacle():
        pytest.skip(f"no hosts can be made here: {obstacle}")
    try:
        ray_environment.make()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"Ray cannot be installed here: {error}")
    path = tmp_path / "faults.json"
    subprocess.run([sys.executable, "-m", "bench.node_faults", "--json", str(path)], check=True, cwd=ROOT)
    document = json.loads(path.read_text())
    cases = {case["fault"]: case for case in document["cases"]}
    assert document["problems"] == [] and not [case for case in cases.values() if case["problems"]]
    refused = {fault for fault, case in cases.items() if case["refused"]}
    assert refused == {fault for fault in cases if "only encoder" in fault}, "where nobody else serves the stage"
    assert cases["killed, another one serves (c)"]["continued"]
    cut = cases["cut between b and c"]
    assert cut["slowest_answer_s"] < cut["lasted_s"], "they go where the encoder is reached"
