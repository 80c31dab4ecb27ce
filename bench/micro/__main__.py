"""Runs all micro-benchmarks of this machine one after another and summarises them. `make bench`.

Each runs in a process of its own with a time limit, so a failure does not stop the others. DIR gets a JSON document and
a log of each, summary.md and summary.png. `python -m bench.micro [--full] [--only sched,decode]`; a single one with its
own flags is `python -m bench.micro.NAME`. The exit status is 0 if all of them came to an end.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.common import ROOT
from bench.micro.goals import BENCHES
from bench.micro.parts import Part, Runner
from bench.summary import table

QUICK_LIMIT_S, FULL_LIMIT_S = 150.0, 900.0


def parse() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        if unknown := [name for name in names if name not in BENCHES]:
            raise argparse.ArgumentTypeError(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHES)}")
        return names

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=ROOT / "build" / "bench", help="where everything goes")
    parser.add_argument("--full", action="store_true", help="all sizes, more turns: minutes each")
    parser.add_argument("--only", type=names, default=list(BENCHES), metavar="NAMES", help="with commas")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="of all together")
    parser.add_argument("rest", nargs="*", metavar="-- FLAGS", help="for each, for example -- --device cpu --threads 1")
    return parser.parse_args()


def main() -> int:
    options = parse()
    folder: Path = options.dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    mode, limit_s = ("--full", FULL_LIMIT_S) if options.full else ("--quick", QUICK_LIMIT_S)
    parts = []
    for name in (name for name in BENCHES if name in options.only):
        document = folder / f"{name}.json"
        document.unlink(missing_ok=True)
        command = (sys.executable, "-m", f"bench.micro.{name}", mode, "--json", str(document), *options.rest)
        parts.append(Part(name, command, limit_s))
    runner = Runner(folder, options.budget)
    runner.run(parts)
    bad = [outcome for outcome in runner.outcomes.values() if outcome.state != "ok"]
    for path in table.write(folder, [f"{o.name}: {o.state}. {o.said}" for o in bad]):
        print(path)
    print(f"{len(parts) - len(bad)} of {len(parts)} benchmarks, {runner.elapsed_s:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
