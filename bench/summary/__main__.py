"""Summarises the JSON documents of micro-benchmarks: summary.md, and summary.png where matplotlib is installed.

Every row: its time, its floor, the share of the floor's rate, and what is wanted of it (`bench/micro/goals.py`).
`python -m bench.summary DIR` reads DIR/*.json and writes there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.summary.table import write


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the documents are")
    folder: Path = parser.parse_args().folder
    if not folder.is_dir():
        print(f"there is no folder {folder}", file=sys.stderr)
        return 2
    for path in write(folder):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
