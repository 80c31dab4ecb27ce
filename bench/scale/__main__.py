"""Sizes beyond this machine: where a deployment of hundreds of instances bends, from simulated ones and real parts.

`simulate`: deployments of 8, 64 and 512 devices at a load in proportion, with the real router, frontend's table and
schedulers: what each device still does, what the frontend takes of a core, how soon an instance that joins carries its
share. `routing`: a decision alone. `wire`: messages to and from the one frontend, with MACs and without. `tokens`: what
a streamed token costs there (bench.frontend). `links`: an instance's connections with its peers. `starts`: real starts
of up to 64 processes over TCP, and of an instance of the demo model that comes back. The last line of the output is one
JSON document; `--kept FILE` takes the parts, and the simulated deployments, that are not measured from an earlier one.
`wire` needs `simulate`, whose statuses it takes.

    python -m bench.scale --pictures docs/pictures > scale.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.common import card, emit
from bench.scale.budget import budget
from hydra_engine.core.reports import Status

PARTS = ("simulate", "wire", "routing", "tokens", "links", "starts")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.pictures is not None:
        from bench.scale import drawing
    kept = {} if options.kept is None else json.loads(options.kept.read_text(encoding="utf-8"))
    document: dict[str, Any] = {"bench": "scale", "parts": dict(kept.get("parts", {})), "cards": kept.get("cards", {})}
    statuses: list[Status] = []
    for part in options.parts:
        began_s = time.perf_counter()
        if part == "wire" and not statuses:
            raise SystemExit("bench.scale: wire takes the statuses of simulate; give both")
        with contextlib.redirect_stdout(sys.stderr):
            found = _MEASURE[part](options, statuses)
        if part == "simulate":
            found["rows"] = _joined(document["parts"].get(part, {"rows": []})["rows"], found["rows"])
        document["parts"][part] = found
        document["cards"][part] = card()
        say(f"{part}: {time.perf_counter() - began_s:.0f} s")
    document["parts"]["budget"] = budget(document["parts"])
    document["card"] = card()
    if options.pictures is not None:
        from bench.scale import drawing

        for path in drawing.draw(document, options.pictures):
            say(f"picture: {path}")
    emit(document)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _joined(kept: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, and those of the kept ones that they do not replace, by size."""
    measured = {(row["devices"], row["topology"]) for row in rows}
    others = [row for row in kept if (row["devices"], row["topology"]) not in measured]
    return sorted([*others, *rows], key=lambda row: (row["devices"], row["topology"] != "EPD"))


# ---- parts


def _simulate(options: argparse.Namespace, statuses: list[Status]) -> dict[str, Any]:
    from bench.scale import deployments

    rows = []
    for size in options.sizes:
        for kind in options.kinds:
            row = deployments.run(kind, size, options.rate, options.seconds, joins_s=options.joins_s)
            found = row.pop("statuses")
            if kind == options.kinds[0]:
                statuses[:] = found
            rows.append(row)
            calls = row["frontend"]["calls"]
            say(
                f"{size:4} {kind:6} {row['requests']} requests, {row['in_flight']} in flight, {row['wall_s']:.0f} s: "
                f"{row['goodput_per_device']:.2f}/s a device, attained {row['attainment']:.3f}; TTFT p90 "
                f"{row['ttft_ms']['p90']:.0f} ms, TPOT p90 {row['tpot_ms']['p90']:.1f} ms; "
                + ", ".join(f"{name} {one['us']:.0f} us ({one['core']:.3f})" for name, one in calls.items())
                + f"; joined {row['joined']}"
            )
    return {
        "model": deployments.MODEL,
        "device": deployments.DEVICE,
        "load": deployments.LOAD,
        "ttft_limit_s": deployments.LIMITS.ttft_s,
        "tpot_limit_s": deployments.LIMITS.tpot_limit_s,
        "link_bytes_per_s": deployments.LINK_BYTES_PER_S,
        "rows": rows,
    }


def _wire(options: argparse.Namespace, statuses: list[Status]) -> dict[str, Any]:
    from bench.scale import wire

    return wire.measure(statuses, options.step_tokens)


def _routing(options: argparse.Namespace, _: list[Status]) -> dict[str, Any]:
    from bench.scale import decisions

    return decisions.run(options.routed)


def _tokens(options: argparse.Namespace, _: list[Status]) -> dict[str, Any]:
    from bench.frontend import __main__ as frontend

    flags = ["--kinds", "front", "--rounds", "2", *(["--quick"] if options.quick else [])]
    found: dict[str, Any] = frontend.run(frontend.parse(flags))
    return {"streams": found["streams"], "rounds": found["rounds"]["front"], **found["medians"]["front"]}


def _links(options: argparse.Namespace, _: list[Status]) -> list[dict[str, Any]]:
    from bench.scale import links

    rows = links.run(options.links)
    for row in rows:
        say(", ".join(f"{name} {value:.3g}" for name, value in row.items()))
    return rows


def _starts(options: argparse.Namespace, _: list[Status]) -> dict[str, Any]:
    from bench.scale import starts

    rows = []
    for count in options.starts:
        rows.append(starts.start(count))
        say(", ".join(f"{name} {value}" for name, value in rows[-1].items()))
    joined = starts.joins(options.model)
    say(str(joined))
    return {"rows": rows, "demo": joined}


_MEASURE: dict[str, Callable[[argparse.Namespace, list[Status]], Any]] = {
    "simulate": _simulate,
    "wire": _wire,
    "routing": _routing,
    "tokens": _tokens,
    "links": _links,
    "starts": _starts,
}


# ---- options


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=_parts, default=list(PARTS), help=f"with commas (default: {','.join(PARTS)})")
    parser.add_argument("--kept", type=Path, metavar="FILE", help="a document with the parts that are not measured")
    parser.add_argument("--quick", action="store_true", help="small sizes, some seconds")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="write PNGs there (needs matplotlib)")
    parser.add_argument("--sizes", type=_numbers, default=[8, 64, 512], help="simulated devices, multiples of 8")
    parser.add_argument("--kinds", type=_words, default=["EPD", "E+P+D"], help="topologies (default: both)")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second and device (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a simulated load (default: %(default)s)")
    parser.add_argument(
        "--joins-s", type=float, default=2.5, help="when the last instance joins (default: %(default)s)"
    )
    parser.add_argument("--step-tokens", type=int, default=20, help="tokens of one step's message")
    parser.add_argument("--routed", type=_numbers, default=[8, 16, 32, 64, 128, 256, 512], help="instances of routing")
    parser.add_argument("--links", type=_numbers, default=[15, 63, 255, 511], help="peers of one instance")
    parser.add_argument("--starts", type=_numbers, default=[8, 32, 64], help="instances that start")
    parser.add_argument("--model", default="demo", help="of the instance that comes back (default: demo)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.sizes, options.seconds, options.joins_s = [8], 5.0, 1.5
        options.routed, options.links, options.starts = [8, 16], [4, 8], [3]
    return options


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _parts(text: str) -> list[str]:
    if unknown := set(found := text.split(",")) - {*PARTS, ""}:
        raise argparse.ArgumentTypeError(f"there is no part {sorted(unknown)[0]!r}, only {', '.join(PARTS)}")
    return [part for part in found if part]


if __name__ == "__main__":
    main()
