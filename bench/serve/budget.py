"""Mode `budget`: are steps within the TPOT limit, and how much of it do they use, while work always waits.

A fixed number of requests with a picture each is always under way, so prefill and encodes wait at every step while
others decode. Steps are counted by our server (`hydra:*` on /metrics), gaps by the client for any server, and by ours
in its own stamps, which the way through the socket does not blur.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.serve.harness import Harness, say
from bench.serve.page import growth, readings
from hydra_planner.records import quantile
from hydra_terminal.load.loops import Run, closed_loop

_STEPS, _LATE, _USED = "hydra:decode_steps_total", "hydra:late_steps_total", "hydra:limit_used_ratio"
_WORKLOAD = ("textvqa",)  # a picture, a question and an answer of 16 tokens: all three stages all the time
_MAX_SPEED_UP = 8  # requests made ready: as many as a server ends that batches so many times faster than one by one


def run(harness: Harness) -> dict[str, Any]:
    settings = harness.settings
    workload = replace(settings.workload, shapes=_WORKLOAD, text_share=0.0, reuse=False)
    runs: dict[str, list[Run]] = {server.name: [] for server in settings.servers}
    contents = [harness.next_content() for _ in range(settings.rounds)]
    count = settings.concurrency + int(settings.seconds * harness.idle_rate * _MAX_SPEED_UP)
    for server, round_number in harness.turns():
        specs = workload.specs(count, contents[round_number])
        target = harness.serving(server)
        done = closed_loop(target, specs, settings.concurrency, settings.seconds, with_pages=True)
        harness.note(target, done, concurrency=settings.concurrency)
        runs[server.name].append(done)
    return {"servers": {name: _result(harness, done) for name, done in runs.items()}}


def _result(harness: Harness, runs: list[Run]) -> dict[str, Any]:
    limit_s = harness.limits.tpot_limit_s
    gaps = [gap for run in runs for record in run.records for gap in record.gaps()]
    steps, late = (_total(runs, name) for name in (_STEPS, _LATE))
    verdicts = [record.slo for run in runs for record in run.records if record.slo is not None]
    counted = sum(slo["num_gaps"] for slo in verdicts)
    used = [value for run in runs for value in readings(run.pages, _USED) if value > 0]
    return {
        "requests": sum(record.ok for run in runs for record in run.records),
        "errors": sum(not record.ok for run in runs for record in run.records),
        "requests_per_s": round(sum(r.ok for run in runs for r in run.records) / sum(run.wall_s for run in runs), 2),
        "decode_steps": steps,
        "late_steps": late,
        "late_share": round(late / steps, 5) if steps and late is not None else None,
        "limit_used": round(sum(used) / len(used), 4) if used else None,
        "gaps": len(gaps),
        "late_gap_share": round(sum(gap > limit_s for gap in gaps) / len(gaps), 5) if gaps else None,
        "late_gap_share_says_server": (
            round(sum(slo["late_gaps"] for slo in verdicts) / counted, 5) if counted else None
        ),
        "gap_of_limit": {
            name: None if (value := quantile(gaps, share)) is None else round(value / limit_s, 3)
            for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
        },
        "gaps_ms": [round(gap * 1e3, 3) for gap in gaps],
    }


def _total(runs: list[Run], name: str) -> int | None:
    counts = [growth(run.pages, name) for run in runs]
    return None if any(count is None for count in counts) else int(sum(count or 0 for count in counts))


def report(result: dict[str, Any]) -> None:
    heads = (
        f"{'steps':>7} {'late':>8} {'limit used':>10} {'late gaps':>10} {'by server':>10} {'gap/limit p50 p90 p99':>22}"
    )
    say(f"\n{'server':20} {heads}")
    for name, server in result["servers"].items():
        of_limit = " ".join(_shown(value, "{:.2f}") for value in server["gap_of_limit"].values())
        late = _shown(server["late_gap_share"], "{:.2%}")
        by_server = _shown(server["late_gap_share_says_server"], "{:.2%}")
        say(
            f"{name:20} {_shown(server['decode_steps'], '{}'):>7} {_shown(server['late_share'], '{:.2%}'):>8} "
            f"{_shown(server['limit_used'], '{:.2f}'):>10} {late:>10} {by_server:>10} {of_limit:>22}"
        )


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
