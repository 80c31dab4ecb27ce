"""The same requests over every topology, and how many get the tokens of one instance.

All must. Each topology serves the mixture twice: with empty caches, then with what they hold.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.common import card, emit
from bench.mixed import Mixed, Outcome, agrees, alone, mixture, together
from hydra_engine import Engine
from tools.miniatures import make_tiny

TOPOLOGIES = ("EPD", "2EPD", "EP+D", "ED+P", "E+PD", "E+P+D", "2E+P+2D")
SETTINGS: dict[str, dict[str, Any]] = {
    "chunks of 24 tokens": {"token_budget": 24},
    "whole prompts": {"token_budget": 512},
    "no reuse": {"token_budget": 512, "prefix_caching": False},
}
COMMON: dict[str, Any] = {"threads": 1, "block_size": 4, "num_kv_blocks": 1024}


def row(model: Path, topology: str, requests: list[Mixed], golden: list[Outcome], **options: Any) -> dict[str, Any]:
    with Engine(model, topology=topology, **(COMMON | options)) as engine:
        rounds = [together(engine, requests) for _ in range(2)]
        transfers = [status.transfer for status in engine.statuses().values()]
    equal = [sum(map(agrees, requests, found, golden)) for found in rounds]
    return {
        "topology": topology,
        "equal": equal,
        "of": len(requests),
        "pulled": sum(t.pulled for t in transfers),
        "pulled_bytes": sum(t.pulled_bytes for t in transfers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default=",".join(TOPOLOGIES), help="with commas")
    parser.add_argument("--requests", type=int, default=64)
    arguments = parser.parse_args()
    requests, results = mixture(arguments.requests), []
    print(f"{'topology':10} {'setting':20} {'caches empty':>13} {'again':>9} {'pulls':>6} {'MiB moved':>10}")
    with TemporaryDirectory() as folder:
        model = Path(folder)
        make_tiny("llava", model, seed=7)
        with Engine(model, **(COMMON | {"num_kv_blocks": 2048})) as engine:
            golden = alone(engine, requests)
        for topology in arguments.topology.split(","):
            for name, options in SETTINGS.items():
                result = row(model, topology, requests, golden, **options) | {"setting": name}
                results.append(result)
                first, again = (f"{equal}/{result['of']}" for equal in result["equal"])
                moved = result["pulled_bytes"] / (1 << 20)
                print(
                    f"{topology:10} {name:20} {first:>13} {again:>9} {result['pulled']:>6} {moved:>10.1f}", flush=True
                )
    emit({"bench": "equality", "results": results, "card": card()})


if __name__ == "__main__":
    main()
