"""Times `hydra-engine serve` until it answers, with the most memory that one of its processes holds until then.

Seconds are from the start of the process to the line that says ready, medians of `--rounds`; `--before` takes turns
with the source tree of another version. Run it twice: the first time reads the files from the disk. System time is
mostly the kernel's clearing of fresh pages; in a virtual machine whose free pages go back to the host it is many times
that of a machine of its own, and differs from start to start.

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
_WEIGHTS = re.compile(r"memory +weights ([0-9.]+) (MiB|GiB)")
_END_S = 60.0
_IMPORT = "import time; began = time.perf_counter(); import hydra_engine; print(time.perf_counter() - began)"


class Start(NamedTuple):
    import_s: float  # of hydra_engine, in a process of its own
    ready_s: float
    loaded_s: float  # of that, as the instance says
    user_s: float  # of the server's process and its children
    system_s: float
    peak_bytes: int  # of the largest of them
    weights_bytes: float  # as the instance says
    front_bytes: int  # resident when it is ready, of the server's process
    instances_bytes: int  # and of all its children, of which some are forks that share pages


def start(tree: Path, words: list[str]) -> Start:
    """Starts a server and ends it when it is ready. Raises RuntimeError with its log where it never is."""
    command = [sys.executable, "-m", "hydra_engine", "serve", *words, "--port", "0"]
    environment = dict(os.environ, PYTHONPATH=str(tree))
    imported = subprocess.run(
        [sys.executable, "-c", _IMPORT], stdout=subprocess.PIPE, env=environment, cwd=tree, check=True
    )
    import_s = float(imported.stdout)
    began = time.perf_counter()
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=tree)
    assert server.stderr is not None
    lines, loaded_s, weights_bytes = [], math.nan, math.nan
    try:
        for line in server.stderr:
            lines.append(line)
            if _LOADED in line:
                loaded_s = float(line.split()[2])
            if weights := _WEIGHTS.search(line):
                weights_bytes = float(weights[1]) * 2 ** {"MiB": 20, "GiB": 30}[weights[2]]
            if line.startswith(_READY):
                ready_s = time.perf_counter() - began
                user, system, peak = zip(*map(_used, (server.pid, *_children(server.pid))), strict=True)
                front, *children = map(_resident_bytes, (server.pid, *_children(server.pid)))
                return Start(
                    import_s, ready_s, loaded_s, sum(user), sum(system), max(peak), weights_bytes, front, sum(children)
                )
        raise RuntimeError("the server did not start:\n" + "".join(lines[-20:]))
    finally:
        server.terminate()
        server.communicate(timeout=_END_S)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _used(pid: int) -> tuple[float, float, int]:
    """(seconds in its own code, seconds in the kernel, peak of resident bytes)"""
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert peak is not None
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return int(user) / ticks_per_s, int(system) / ticks_per_s, int(peak[1]) << 10


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
        share = taken.peak_bytes / taken.weights_bytes
        print(
            f"{name}: ready in {taken.ready_s:.2f} s, of which loading {taken.loaded_s:.1f} s; CPU seconds "
            f"{taken.user_s:.1f} of programs and {taken.system_s:.1f} of the kernel; at most "
            f"{taken.peak_bytes / 2**20:.0f} MiB in one process, {share:.2f} of its weights; "
            f"{taken.front_bytes / 2**20:.0f} MiB in the server's, {taken.instances_bytes / 2**20:.0f} in all others; "
            f"import {taken.import_s * 1e3:.0f} ms"
        )
    rounds = {name: [one._asdict() for one in taken] for name, taken in starts.items()}
    results = {name: taken._asdict() for name, taken in medians.items()}
    emit({"bench": "ready", "results": results, "rounds": rounds, "card": card()})


if __name__ == "__main__":
    main()
