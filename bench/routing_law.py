"""Shares of requests that drawn deployments keep with a stage more in a role (tests/planner/test_routing_law.py).

Each line has a draw, the load, and the share of requests that the larger and the smaller deployment keep within their
limits there. `--told`: deployments know the limits, whatever was drawn. The last line is one JSON document.

    python -m bench.routing_law --draws 0:131 > routing-law.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.common import card, emit
from tests.planner.test_routing_law import CHANCE, KEPT, SHARE, drawn


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.routing_law", description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", default="0:20", help="from:to, without the last (0:20)")
    parser.add_argument("--told", action="store_true", help="deployments know the limits")
    options = parser.parse_args(arguments)
    begin, end = map(int, options.draws.split(":"))
    rows: list[dict[str, Any]] = []
    for number in range(begin, end):
        case = drawn(number)
        case = replace(case, told=case.told or options.told)
        rate = KEPT * case.goodput()
        if not rate:
            continue  # the limits cannot be kept at all
        larger, smaller = case.attainment(case.larger, rate), case.attainment(case.smaller, rate)
        holds = larger >= min(SHARE, smaller) - CHANCE
        rows.append({"draw": number, "told": case.told, "rate": rate, "larger": larger, "smaller": smaller})
        rows[-1]["holds"] = holds
        print(f"{number}: {rate:.3g}/s, {larger:.3f} beside {smaller:.3f}{'' if holds else ': less'}", file=sys.stderr)
    emit({"bench": "routing_law", "rows": rows, "card": card()})


if __name__ == "__main__":
    main()
