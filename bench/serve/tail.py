"""Mode `tail`: how evenly text streams flow while large pictures arrive in bursts, against the same streams alone.

Every server gets both loads in each round, streams alone first. Gaps count from when every stream has its first token,
and with pictures only from the first burst until the last picture's answer, so that quiet time dilutes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.serve.harness import Harness, say
from hydra_planner.records import Record, quantile
from hydra_planner.workload.shapes import SHAPES
from hydra_terminal.load.target import Target
from hydra_terminal.load.workload import Spec, sentence

_STREAM_WORDS = 24
_PICTURE_TOKENS = 4
_BURST_WORDS = 16
_SETTLE_S = 0.1  # streams run alone before the first burst
_LARGE = "vizwiz"
_STREAM, _PICTURE = "stream", "burst"


def run(harness: Harness) -> dict[str, Any]:
    gaps: dict[str, dict[str, list[float]]] = {
        server.name: {"alone": [], "with_pictures": []} for server in harness.settings.servers
    }
    pictures: dict[str, list[float]] = {server.name: [] for server in harness.settings.servers}
    contents = [(harness.next_content(), harness.next_content()) for _ in range(harness.settings.rounds)]
    for server, round_number in harness.turns():
        alone_content, burst_content = contents[round_number]
        target = harness.serving(server)
        alone = _load(harness, target, alone_content, bursts=0)
        beside = _load(harness, target, burst_content, bursts=_num_bursts(harness, alone))
        gaps[server.name]["alone"] += _stream_gaps(alone)
        gaps[server.name]["with_pictures"] += _stream_gaps(beside)
        pictures[server.name] += [r.ttft_s for r in beside if r.kind == _PICTURE and r.ttft_s is not None]
        counts = [len(found) for found in gaps[server.name].values()]
        say(f"tail {server.name}: {counts[0]} gaps alone, {counts[1]} beside {len(pictures[server.name])} pictures")
    return {"servers": {name: _result(found, pictures[name]) for name, found in gaps.items()}}


def _num_bursts(harness: Harness, alone: Sequence[Record]) -> int:
    """Number of bursts that begin within the first two thirds of the time that the streams take alone; beside pictures
    they take longer."""
    span_s = max(record.end_s for record in alone) - _SETTLE_S
    return max(int(span_s * 2 / 3 / harness.settings.burst_every_s), 1)


def _load(harness: Harness, target: Target, content: int, bursts: int) -> Sequence[Record]:
    settings = harness.settings
    rng = np.random.default_rng([settings.workload.seed, content])
    specs = [Spec(_STREAM, (), sentence(rng, _STREAM_WORDS), settings.stream_tokens) for _ in range(settings.streams)]
    times_s = [0.0] * len(specs)
    for number in range(bursts):
        for _ in range(settings.burst):
            size = SHAPES[_LARGE].draw_size(rng, settings.workload.scale)
            picture = (*size, int(rng.integers(1 << 31)))
            specs.append(Spec(_PICTURE, (picture,), sentence(rng, _BURST_WORDS), _PICTURE_TOKENS))
            times_s.append(_SETTLE_S + number * settings.burst_every_s)
    return harness.run_specs(target, specs, times_s, pictures=bursts * settings.burst).records


def _stream_gaps(records: Sequence[Record]) -> list[float]:
    streams = [record for record in records if record.kind == _STREAM]
    since_s = max((record.stamps[0] for record in streams if record.stamps), default=0.0)
    bursts = [record for record in records if record.kind == _PICTURE]
    until_s = max((record.end_s for record in bursts), default=float("inf"))
    if bursts:
        since_s = max(since_s, min(record.sent_s for record in bursts))
    return [gap for record in streams for gap in record.gaps(since_s, until_s)]


def _result(gaps: dict[str, list[float]], picture_ttfts: list[float]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, values in gaps.items():
        figures = {f"p{share:g}": quantile(values, share / 100) for share in (50, 90, 99, 100)}
        result[name] = {figure: None if v is None else round(v * 1e3, 3) for figure, v in figures.items()}
        result[name]["gaps_ms"] = [round(value * 1e3, 3) for value in values]
    alone, beside = result["alone"]["p99"], result["with_pictures"]["p99"]
    result["ratio_p99"] = round(beside / alone, 3) if alone and beside else None
    result["picture_ttft_ms"] = {
        name: None if (value := quantile(picture_ttfts, share)) is None else round(value * 1e3, 1)
        for name, share in (("p50", 0.5), ("p90", 0.9))
    }
    return result


def report(result: dict[str, Any]) -> None:
    say(
        f"\n{'server':20} {'alone p50/p99 ms':>18} {'with pictures':>18} {'p99 ratio':>10} {'pictures TTFT p50 ms':>21}"
    )
    for name, server in result["servers"].items():
        alone, beside = server["alone"], server["with_pictures"]
        say(
            f"{name:20} {_pair(alone):>18} {_pair(beside):>18} {server['ratio_p99'] or float('nan'):10.2f} "
            f"{server['picture_ttft_ms']['p50'] or float('nan'):21.1f}"
        )


def _pair(figures: dict[str, Any]) -> str:
    return f"{figures['p50'] or float('nan'):.2f} / {figures['p99'] or float('nan'):.2f}"
