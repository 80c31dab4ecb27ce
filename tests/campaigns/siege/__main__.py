"""Five minutes of siege, by default; a case, a group, a search at night, or a control.

Every case that fails prints one line of JSON, which --replay takes. Exit code 1 if one has failed; with --control 1 if
none has, for a guard was taken out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.common import ROOT
from tests.campaigns.siege import climb, controls, long, networks, processes
from tests.campaigns.siege.cases import AT_ONCE, CASES, SECONDS
from tests.campaigns.siege.oracles import Finding
from tests.campaigns.siege.stage import Case, Stage

ALL = (*CASES, *climb.CASES)
CASE_S = 240.0  # whatever it does


def seed_of_commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "0"


class Campaign:
    def __init__(self, seed: str, scale: float) -> None:
        self.stage = Stage(seed)
        self.num_failed = 0
        self._scale = scale
        self._rows: list[tuple[str, int, float, Counter[str]]] = []

    async def run(self, chosen: list[Case], point: dict[str, Any] | None = None) -> None:
        try:
            for group in dict.fromkeys(case.group for case in chosen):
                await self._group(group, [case for case in chosen if case.group == group], point or {})
        finally:
            self.stage.close()

    async def _group(self, group: str, cases: list[Case], point: dict[str, Any]) -> None:
        """Runs the first cases, and the others while there is time; of many, those that the seed draws."""
        began, failed, num_run = time.monotonic(), Counter[str](), 0
        budget_s = SECONDS[group] * self._scale
        self.stage.seconds = budget_s
        ahead = iter(_ordered(cases, self.stage.seed))

        async def work() -> None:
            nonlocal num_run
            for case in ahead:
                num_run += 1
                self.stage.point, self.stage.found = point, {}
                for finding in await self._case(case):
                    failed[finding.oracle] += 1
                    self._tell(case, finding)
                if num_run >= _LEAST and time.monotonic() - began > budget_s:
                    return

        await asyncio.gather(*(work() for _ in range(AT_ONCE.get(group, 1))))
        self._rows.append((group, num_run, time.monotonic() - began, failed))
        print(f"siege: {_row(*self._rows[-1])}", flush=True)

    async def _case(self, case: Case) -> list[Finding]:
        try:
            async with asyncio.timeout(CASE_S):
                return await self.stage.run(case)
        except TimeoutError:
            self.stage.close()
            return [Finding("ends", f"the case has not ended after {CASE_S:g} s")]
        except (OSError, RuntimeError) as error:
            self.stage.close()
            return [Finding("ends", f"{type(error).__name__}: {error}")]

    def _tell(self, case: Case, finding: Finding) -> None:
        self.num_failed += 1
        line = {"seed": self.stage.seed, "case": case.full_name, "oracle": finding.oracle, "value": finding.value[:600]}
        if self.stage.found:
            line["point"] = self.stage.found
        print(json.dumps(line), flush=True)

    def summary(self) -> str:
        lines = [f"{'group':12} {'cases':>5} {'s':>6}  failed oracles", *(_row(*row) for row in self._rows)]
        for reason in dict.fromkeys(self.stage.skipped):
            lines.append(f"skipped: {reason}")
        return "\n".join(lines)


_LEAST = 14  # cases of a group that always run
_FIRST = 2  # of them, in any case


def _row(group: str, num_cases: int, seconds: float, failed: Counter[str]) -> str:
    told = ", ".join(f"{oracle} {count}" for oracle, count in failed.items()) or "-"
    return f"{group:12} {num_cases:5} {seconds:6.1f}  {told}"


def _ordered(cases: list[Case], seed: str) -> list[Case]:
    """Puts some cases first, which always run, and the others behind them in an order by the seed."""
    if len(cases) <= _LEAST:
        return cases
    first, rest = cases[:_FIRST], cases[_FIRST:]
    random.Random(seed).shuffle(rest)
    return first + rest


def choose(name: str) -> list[Case]:
    chosen = [case for case in ALL if name in (case.group, case.full_name)]
    if not chosen:
        raise SystemExit(f"there is no case {name!r}; groups are {', '.join(SECONDS)}")
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.siege", description=__doc__)
    parser.add_argument("--case", action="append", help="a group, or GROUP/CASE; can be repeated (default: all)")
    parser.add_argument("--seed", help="of what is drawn (default: the commit)")
    parser.add_argument("--scale", type=float, default=1.0, help="times as many seconds for every group")
    parser.add_argument("--replay", metavar="LINE", help="a line that a case printed when it failed")
    parser.add_argument("--control", metavar="NAME", help="a patch of controls/, or drawn: its case must fail")
    parser.add_argument("--minutes", type=float, help="the long form: mixed traffic over all topologies, in pieces")
    parser.add_argument("--state", metavar="FILE", help="of the long form, to which its pieces add up")
    parser.add_argument("--list", action="store_true", help="tells the cases and controls")
    arguments = parser.parse_args()
    # A shell without job control starts what runs in the background with this signal ignored, and servers inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seed = arguments.seed or seed_of_commit()
    if arguments.list:
        print("\n".join([*(case.full_name for case in ALL), *(f"control {name}" for name in controls.names())]))
        return 0
    if arguments.control:
        return control(arguments.control, seed)
    chosen, point = [case for name in arguments.case or SECONDS for case in choose(name)], None
    if arguments.replay:
        line = json.loads(arguments.replay)
        seed, chosen, point = line["seed"], choose(line["case"]), line.get("point")
    processes.adopt_orphans()
    campaign = Campaign(seed, arguments.scale)
    reason = networks.why_not()
    if reason is not None:
        campaign.stage.skipped.append(f"hosts, for there are no networks of one's own here: {reason}")
        chosen = [case for case in chosen if case.group != "hosts"]
    with networks.joined() if reason is None else contextlib.nullcontext():
        campaign.stage.has_networks = reason is None
        if arguments.minutes:
            path = Path(arguments.state or ROOT / "build" / "siege.json")
            path.parent.mkdir(exist_ok=True)
            return 0 if long.run(seed, path, arguments.minutes * 60, has_networks=reason is None) else 1
        asyncio.run(campaign.run(chosen, point))
    print(campaign.summary())
    return 1 if campaign.num_failed else 0


def control(name: str, seed: str) -> int:
    try:
        name = controls.find(name, seed)
        print(f"siege: without {name}, {controls.case_of(name)} must fail", flush=True)
        code = controls.run(name, ["--seed", seed])
    except controls.ControlError as error:
        print(f"siege: {error}", file=sys.stderr)
        return 2
    if code == 1:
        print(f"siege: it has failed without {name}, as it must")
        return 0
    print(f"siege: exit code {code} without {name}: the case does not see what it is for")
    return 1


if __name__ == "__main__":
    sys.exit(main())
