"""Workload files as the recorder writes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hydra_planner.workload.file import WorkloadRequest, header_line, request_line


def write_workload(path: Path, requests: Iterable[WorkloadRequest], source: str = "") -> None:
    lines = [header_line(source), *map(request_line, requests)]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
