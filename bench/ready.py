"""How long until `hydra-engine serve` answers, and the most memory that one of its processes holds until then.

Seconds are from the start of the process to the line that says ready, medians of `--rounds`; `--before` takes turns
with the source tree of another version. Run it twice: the first time reads the files from the disk.

    python -m bench.ready DIR --dtype bfloat16
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from bench.common import ROOT, card, emit

_READY, _LOADED = "ready on ", "loaded in"
_END_S = 60.0


class Start(NamedTuple):
    ready_s: float
    loaded_s: float  # of that, as the instance says
    cpu_s: float  # of the server's process and its children
    peak_bytes: int  # of the largest of them


def start(tree: Path, words: list[str]) -> Start:
    """Starts a server and ends it when it is ready. Raises RuntimeError with its log where it never is."""
    command = [sys.executable, "-m", "hydra_engine", "serve", *words, "--port", "0"]
    began = time.perf_counter()
    environment = dict(os.environ, PYTHONPATH=str(tree))
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=tree)
    assert server.stderr is not None
    lines, loaded_s = [], math.nan
    try:
        for line in server.stderr:
            lines.append(line)
            if _LOADED in line:
                loaded_s = float(line.split()[2])
            if line.startswith(_READY):
                ready_s = time.perf_counter() - began
                used = [_used(pid) for pid in (server.pid, *_children(server.pid))]
                return Start(ready_s, loaded_s, sum(cpu_s for cpu_s, _ in used), max(peak for _, peak in used))
        raise RuntimeError("the server did not start:\n" + "".join(lines[-20:]))
    finally:
        server.terminate()
        server.communicate(timeout=_END_S)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _used(pid: int) -> tuple[float, int]:
    """(CPU seconds, peak of resident bytes)"""
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert peak is not None
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK"), int(peak[1]) << 10


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench ready", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a directory, or what else `serve` takes; flags of `serve` follow")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, help="a source tree with its extension built")
    arguments, flags = parser.parse_known_args()
    trees = {"now": ROOT} | ({"before": arguments.before.resolve()} if arguments.before else {})
    words = [os.path.abspath(arguments.model) if os.path.isdir(arguments.model) else arguments.model, *flags]
    starts: dict[str, list[Start]] = {name: [] for name in trees}
    for _ in range(arguments.rounds):
        for name, tree in trees.items():
            starts[name].append(start(tree, words))
    medians = {name: Start(*map(statistics.median, zip(*taken, strict=True))) for name, taken in starts.items()}
    for name, taken in medians.items():
        print(
            f"{name}: ready in {taken.ready_s:.2f} s, of which loading {taken.loaded_s:.1f} s; {taken.cpu_s:.1f} CPU "
            f"seconds; at most {taken.peak_bytes / 2**20:.0f} MiB in one process"
        )
    emit({"bench": "ready", "results": {name: taken._asdict() for name, taken in medians.items()}, "card": card()})


if __name__ == "__main__":
    main()
