"""A plan in words and tables: what won, by how much and with what certainty, and why the others did not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from hydra_engine.config import MediaConfig
from hydra_planner import explain
from hydra_planner.hardware.devices import Link, devices, links_between
from hydra_planner.search.load import rate_of
from hydra_planner.search.measure import SHARE, Question
from hydra_planner.search.plan import Plan
from hydra_planner.search.rows import Row
from hydra_planner.workload.file import WorkloadRequest

_SHOWN = 24  # rows of the table
_PRICE = 9  # the column of prices


def plan_lines(plan: Plan, question: Question, given: Sequence[str], seconds: float) -> list[str]:
    """`given`: the words of `serve` that the user wrote, the model first; `seconds`: that the plan took."""
    return [
        *_head(plan, question, given[0]),
        "",
        *_table(plan),
        "",
        *_verdict(plan, question, given),
        f"{plan.points} loads with {plan.tokens / 1e6:.2f} million tokens were simulated in {seconds:.0f} s.",
    ]


def _head(plan: Plan, question: Question, model: str) -> Iterator[str]:
    rows, limits = question.rows, question.limits
    pictures = sum(len(row.pictures) for row in rows) / len(rows)
    videos = sum(len(row.videos) for row in rows)
    rate = rate_of(rows)
    text, answer = (sum(lengths) / len(rows) for lengths in zip(*_lengths(rows), strict=True))
    yield f"model       {model}"
    counts = Counter(kind.name for kind in question.kinds.values())
    sources = {kind.name: kind.costs.source for kind in question.kinds.values()}
    for name, count in counts.items():
        yield f"devices     {count} x {name} ({sources[name]})"
    recorded = "all at once" if rate is None else f"recorded at {rate:.3g} requests/s"
    yield (
        f"workload    {len(rows)} requests, {recorded}; on the mean {text:.0f} tokens of text, {pictures:.2g} pictures"
        f"{f', {videos} videos in all' if videos else ''}, {answer:.0f} tokens out"
    )
    for name, (encode_s, prefill_s, decode_s) in plan.work.items():
        yield (
            f"work        of a request on {name}: encode {1e3 * encode_s:.3g} ms, prefill {1e3 * prefill_s:.3g} ms, "
            f"decode {1e3 * decode_s:.3g} ms in full batches"
        )
    yield (
        f"limits      TTFT {1e3 * limits.ttft_s:g} ms, TPOT {1e3 * limits.tpot_limit_s:g} ms, for {SHARE:.0%} of "
        "the requests"
    )


def _table(plan: Plan) -> Iterator[str]:
    offline = plan.objective == "offline"
    result = ("last answer", "") if offline else ("goodput", "requests/s")
    columns = [("topology", ""), ("estimate", "requests/s"), result, ("within", "limits")]
    columns += [("TTFT p50", "ms"), ("p90", "ms"), ("TPOT p50", "ms"), ("p90", "ms"), ("tokens/s", "")]
    columns += [("price", "$/h"), ("why not", "")]
    cells = [*zip(*columns, strict=True), *(_cells(row, offline=offline) for row in plan.rows[:_SHOWN])]
    if all(row.hour_price is None for row in plan.rows[:_SHOWN]):
        cells = [[*row[:_PRICE], *row[_PRICE + 1 :]] for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:-1], widths[1:-1], strict=True)), row[-1]]
        yield "  " + "  ".join(padded).rstrip()
    if len(plan.rows) > _SHOWN:
        yield f"  and {len(plan.rows) - _SHOWN} more, which can do less"


def _cells(row: Row, *, offline: bool) -> list[str]:
    point = row.point
    name = row.name + "".join(f" {setting.flags}" for setting in row.settings)
    price = "" if row.hour_price is None else f"{row.hour_price:.2f}"
    if point is None:
        return [name, f"{row.bound:.3g}", *[""] * 7, price, row.reason]
    result = _time(point.span_s) if offline else _goodput(row)
    times = [f"{1e3 * value:.3g}" for value in (point.ttft.p50, point.ttft.p90, point.tpot.p50, point.tpot.p90)]
    return [
        name,
        f"{row.bound:.3g}",
        result,
        f"{point.attainment:.0%}",
        *times,
        f"{point.tokens_per_s:.0f}",
        price,
        row.reason,
    ]


def _goodput(row: Row) -> str:
    if row.goodput is None:
        return ""
    return f"{row.goodput:.3g}" + ("" if row.uncertainty is None else f" ± {row.uncertainty:.2g}")


def _verdict(plan: Plan, question: Question, given: Sequence[str]) -> Iterator[str]:
    best = plan.best
    limits = ", ".join(
        f"{one.role}: {one.token_budget} tokens a step, {one.max_num_seqs} requests at once, "
        f"{one.kv_tokens} tokens of KV"
        if one.kv_tokens
        else f"{one.role}: {one.image_budget} patches a step"
        for one in plan.limits
    )
    yield f"best        {best.name}: {limits}"
    if best.point is not None and best.price:
        each = explain.tokens_per_kilodollar(best.point.tokens_per_s, best.price)
        yield f"            {each:.3g} tokens/s per $1,000"
    if best.point is not None and best.hour_price and best.point.tokens_per_s:
        yield f"            ${best.hour_price / best.point.tokens_per_s / 3600 * 1e6:.3g} for a million tokens"
    yield f"to start    hydra-engine serve {' '.join([*given, *serve_flags(plan, question)])}"


def serve_flags(plan: Plan, question: Question) -> list[str]:
    """Flags of `hydra-engine serve` for the best topology."""
    limits = question.limits
    flags = [
        f"--topology {plan.best.topology}",
        f"--ttft-slo {_flag(limits.ttft_s)}",
        f"--tpot-slo {_flag(limits.tpot_limit_s)}",
    ]
    workers = question.config.media.decode_workers
    if workers != MediaConfig().decode_workers:
        flags.append(f"--decode-workers {workers}")
    return [*flags, *(setting.flags for setting in plan.best.settings)]


def explain_lines(plan: Plan, question: Question) -> list[str]:
    """HeteroServe's closed forms, for the devices on which the best topology encodes and those where it does the
    rest."""
    placed = [part.split("@") for part in plan.best.topology.split("+")]
    of_stage = {stage: [device for roles, device in placed if stage in roles] for stage in ("E", "D")}
    vision, language = (question.kinds[of_stage[stage][0]] for stage in ("E", "D"))
    known = {device.name: device for device in devices()}
    if vision.name in known and language.name in known:
        links = links_between(known[vision.name], known[language.name])
    else:
        links = (Link("between instances", min(vision.link_bytes_per_s, language.link_bytes_per_s)),)
    return explain.lines(explain.explain(question.spec, question.rows, vision, language, links))


def _lengths(rows: Sequence[WorkloadRequest]) -> list[tuple[int, int]]:
    return [(row.prompt_tokens, row.output_tokens) for row in rows]


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _flag(seconds: float) -> str:
    return f"{1e3 * seconds:g}ms"
